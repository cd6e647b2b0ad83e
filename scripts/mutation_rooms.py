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

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "attn_backends/kernels/e4m3.py",
        "code = tl.where(size < 0x3C800000, small, large)",
        "code = tl.where(size <= 0x3C800000, small, large)",
    ): "both give 8 for 2^-6 itself",
    (
        "spec_decode/sampling/kernels/restrict_logits.py",
        "part = min(_PART, triton.next_power_of_2(vocab))",
        "part = max(_PART, triton.next_power_of_2(vocab))",
    ): "how a row is divided changes the time that it takes, and nothing else",
    (
        "spec_decode/sampling/kernels/restrict_logits_kernels.py",
        "count, sum_exp = _count_part(logits, row, part, vocab, edge, largest, False, PART, LANES, BINS)",
        "count, sum_exp = _count_part(logits, row, part, vocab, edge, largest, True, PART, LANES, BINS)",
    ): "without top_p nothing reads the sums",
    (
        "spec_decode/verification/kernels/block_verify.py",
        "count = tl.min(tl.where(passes, columns, column), 0)",
        "count = tl.min(tl.where(passes, columns, column), (-1))",
    ): "of one axis the first is the last",
    (
        "spec_decode/verification/kernels/partial_max.py",
        "argmax = torch.empty(rows * columns, blocks, dtype=torch.int32, device=device)",
        "argmax = torch.empty(rows * columns, blocks, device=device)",
    ): "a float holds every token of a vocabulary below 2^24",
}
"""Why a change leaves everything as it was, by file, line before and line after."""
