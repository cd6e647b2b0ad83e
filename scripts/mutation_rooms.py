"""What a mutation run draws from, and the changes that change nothing."""

from __future__ import annotations

ROOMS = (
    *("builders/batch.py", "builders/contract.py", "builders/tables.py", "builders/paged.py", "builders/reference.py"),
    *("builders/sparse_window.py", "builders/flashinfer/plan.py", "builders/kernels/*.py"),
    *("attn_backends/torch_reference.py", "attn_backends/sparse_swa_mla.py", "attn_backends/selection.py"),
    *("attn_backends/capabilities.py", "attn_backends/kernels/*.py"),
    *("spec_decode/graphs/*.py", "spec_decode/drafter/*.py", "spec_decode/drafter/*/*.py"),
    *("spec_decode/engine/**/*.py", "spec_decode/sampling/**/*.py", "spec_decode/verification/**/*.py"),
)
"""Patterns of the files whose mutants must die."""

EQUIVALENT: dict[tuple[str, str, str], str] = {}
"""Why a change leaves everything as it was, by file, line before and line after."""
