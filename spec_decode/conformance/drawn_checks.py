"""Families builder, numerics and graph, on cases drawn from all that a backend claims."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import count

from builders import GraphSupport
from builders.kernels.triton_runtime import interpreting, torch_implementations
from spec_decode.conformance.cases import tested_values
from spec_decode.conformance.check import Cases, Family
from spec_decode.conformance.coverage import ADVANCE, CAPTURE, Coverage, column, with_case
from spec_decode.conformance.drawn_cases import STEPS, drawn
from spec_decode.testing.batches import Case
from spec_decode.testing.built_batch import BuiltBatch
from spec_decode.testing.metadata_fields import expect_same_fields
from spec_decode.testing.outcome import Measurements, Unsupported
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.subject import Subject


def _with_known_sizes(*columns: str) -> Coverage:
    """Cover these columns and those of the case; a size only if the matrix has a column for it."""
    known = {
        *(column("page", size) for size in tested_values("page_size")),
        *(column("dim", size) for size in tested_values("head_dim")),
    }
    every = with_case(*columns)
    return lambda subject, case: [
        tag for tag in every(subject, case) if tag.partition(":")[0] not in ("page", "dim") or tag in known
    ]


builder = Family("builder", covers=_with_known_sizes(ADVANCE))
numerics = Family("numerics", covers=_with_known_sizes())
graph = Family("graph", covers=_with_known_sizes(CAPTURE, ADVANCE))

_STORED = "write_kv stores each token in its slot and nothing else"
_REPLAYED = 6
"""Of the cases that can be replayed, one in this many is: a capture takes longer than attention alone."""


_INTERPRETED_BLOCKS = 64
"""Blocks of 16 queries and 64 keys up to which Triton's interpreter runs a case in about half a second."""


def _within_reason(check: Callable[[Subject, Case], Measurements]) -> Callable[[Subject, Case], Measurements]:
    """Run the torch implementation of kernels that would take the interpreter long; the measurements then say so."""

    @wraps(check)
    def run(subject: Subject, case: Case) -> Measurements:
        tiles = -(-max(case.batch.query_lens) * case.spec.group_size // 16) * case.spec.num_kv_heads * case.batch.rows
        if not interpreting() or tiles * -(-case.max_seq_len // 64) <= _INTERPRETED_BLOCKS:
            return check(subject, case)
        with torch_implementations():
            return {**check(subject, case), "torch_implementation": 1.0}

    return run


def _drawn_if(wanted: Callable[[Case], bool], every: int = 1) -> Cases:
    return lambda subject: [(name, case) for name, case in drawn(subject).cases if wanted(case)][::every]


def _advanced(subject: Subject) -> list[tuple[str, Case]]:
    """Return all decodes of one token, and every other one of the cases with more."""
    more = count()
    can = [(name, case) for name, case in drawn(subject).cases if case.other is not None]
    return [(name, case) for name, case in can if case.batch.query_lens[0] == 1 or next(more) % 2 == 0]


@numerics(
    "attention is right for any spec and batch that a backend claims, and a request that is not finite stays alone",
    _drawn_if(lambda case: True),
    shrink=True,
)
@_within_reason
def drawn_attention_is_right(subject: Subject, case: Case) -> Measurements:
    return BuiltBatch.of(subject, case).expect_attention("attention", cache=_STORED)


@builder(
    "P1 and P2 for any spec and batch that a backend claims: an advance means a fresh build, also after other requests "
    "took the rows",
    _advanced,
    advances=True,
)
@_within_reason
def drawn_advances_mean_a_rebuild(subject: Subject, case: Case) -> Measurements:
    assert case.other is not None
    fixture = PagedFixture.of(subject, case)
    built = BuiltBatch(fixture, case.batch, horizon=STEPS)
    if case.batch.query_lens[0] == 1:
        for step in range(1, STEPS + 1):
            built.advance()
            expect_same_fields(built.metadata, built.fresh(horizon=STEPS - step), f"step {step} of P1")
    fixture.exchange_tails()
    built.replace(case.other)
    expect_same_fields(built.metadata, built.fresh(horizon=STEPS), "P2")
    live = len(case.other.seq_lens)
    if live > 2 and not case.other.trees:
        built.end(live // 2)
        expect_same_fields(built.metadata, built.fresh(horizon=STEPS), "P2, with a request at its limit among others")
    return built.expect_attention("attention after P2's refresh")


@graph(
    "a graph of any spec and batch that a backend claims replays over other requests",
    _drawn_if(lambda case: case.other is not None, every=_REPLAYED),
    advances=True,
)
@_within_reason
def drawn_replays_are_right(subject: Subject, case: Case) -> Measurements:
    assert case.other is not None
    if case.batch.query_lens[0] > 1 and subject.backend.builder.graph_support < GraphSupport.UNIFORM_BATCH:
        raise Unsupported("graphs are claimed only for decodes of one token")
    return BuiltBatch.of(subject, case).expect_replay(case.other, "attention of a replay")
