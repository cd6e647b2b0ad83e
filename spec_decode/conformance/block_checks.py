"""Families numerics and graph: if a spec is not causal, a query token also sees later tokens of its block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from spec_decode.conformance.cases import TELLING_VARIANTS, spec_cases
from spec_decode.conformance.check import Family
from spec_decode.conformance.coverage import ADVANCE, CAPTURE, with_case
from spec_decode.testing.batches import RAGGED, VERIFY, Batch, Case
from spec_decode.testing.built_batch import BuiltBatch
from spec_decode.testing.outcome import Measurements
from spec_decode.testing.subject import Subject

_SHAPES = {
    "block": VERIFY,
    "long": Batch((16, 16), (16, 140), 3),
    "ragged": RAGGED,
    "splits": Batch((5, 5), (1030, 700), 2),
}
"""1 + K tokens per request; 15 drafts, more than a tile; blocks of different lengths; and several splits of keys."""
_OTHER = Batch((5, 5, 5, 5), (141, 5, 64, 9), 4)
_VARIANTS = (*TELLING_VARIANTS, "mqa", "window")
_STORED = "write_kv stores each token of a block in its own slot and nothing else"

numerics = Family("numerics", covers=with_case())
graph = Family("graph", covers=with_case(CAPTURE, ADVANCE))


def _blocks(subject: Subject) -> Iterable[tuple[str, Case]]:
    """Yield a few telling variants, made non-causal."""
    for name, case in spec_cases(_SHAPES, _VARIANTS)(subject):
        yield name, Case(replace(case.spec, causal=False), case.batch)


@numerics(
    "a query token of a non-causal group also sees its request's later tokens, and a window cuts off none of them",
    _blocks,
    since=(1, 2),
)
def blocks_see_what_is_behind(subject: Subject, case: Case) -> Measurements:
    built = BuiltBatch.of(subject, case)
    return built.expect_attention("attention of a block", cache=_STORED)


@graph(
    "a graph of a block's attention replays over blocks that end at other positions",
    lambda subject: ((name, case) for name, case in _blocks(subject) if case.batch is VERIFY),
    advances=True,
    since=(1, 2),
)
def blocks_replay_over_other_batches(subject: Subject, case: Case) -> Measurements:
    built = BuiltBatch.of(subject, case)
    return built.expect_replay(_OTHER, "attention of a replay's blocks")
