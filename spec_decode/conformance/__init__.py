"""The conformance kit: one set of checks for any backend, and the ways to run it. Needs no GPU and no pytest."""

from spec_decode.conformance import (  # noqa: F401  the families define their checks on import
    batch_invariance_checks,
    block_checks,
    builder_checks,
    call_checks,
    contract_checks,
    draft_shape_checks,
    drafter_checks,
    drawn_checks,
    fused_write_checks,
    graph_checks,
    memory_checks,
    numerics_checks,
    poison_checks,
    refusal_checks,
    scale_checks,
    soak_checks,
    state_checks,
    tree_checks,
)
from spec_decode.conformance.check import Check
from spec_decode.conformance.known_failures import KnownFailure
from spec_decode.conformance.parametrize import parametrize_with_checks
from spec_decode.conformance.report import ConformanceFailure, Report
from spec_decode.conformance.runner import check_backend, iter_checks
from spec_decode.testing.outcome import CheckFailure, Unavailable, Unsupported

__all__ = [
    "Check",
    "CheckFailure",
    "ConformanceFailure",
    "KnownFailure",
    "Report",
    "Unavailable",
    "Unsupported",
    "check_backend",
    "iter_checks",
    "parametrize_with_checks",
]
