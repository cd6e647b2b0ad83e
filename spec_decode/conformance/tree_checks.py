"""Families numerics and graph: if a spec requests trees, a query token sees its ancestors but no siblings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from builders.spec import MAX_TREE_TOKENS
from spec_decode.conformance.cases import TELLING_VARIANTS, spec_cases
from spec_decode.conformance.check import Family
from spec_decode.conformance.coverage import ADVANCE, CAPTURE, with_case
from spec_decode.testing.batches import Batch, Case, with_trees
from spec_decode.testing.built_batch import BuiltBatch
from spec_decode.testing.outcome import Measurements
from spec_decode.testing.subject import Subject

_BUSHY, _CHAIN, _STAR = (0, 0, 1, 1, 2), (0, 1, 2, 3, 4), (0, 0, 0, 0, 0)
_WIDE = tuple((token - 1) // 3 for token in range(1, 64))
_SHAPES = {
    "trees": Batch((6, 6, 6), (6, 37, 150), 4, (_BUSHY, _CHAIN, _STAR)),
    "ragged": Batch((6, 1, 3), (6, 64, 70), 3, (_BUSHY, (), (0, 0))),
    "wide": Batch((64, 64), (64, 130), 2, (_WIDE, _WIDE)),
    "splits": Batch((6, 6), (1030, 700), 2, (_BUSHY, _STAR)),
}
"""Three different trees at once with a padding row; trees next to a decode; as many tokens as a mask has bits; and
trees after several splits of keys."""
_OTHERS = {
    "trees": Batch((6, 6, 6, 6), (141, 64, 6, 9), 4, (_STAR, _BUSHY, (0, 0, 2, 1, 4), _CHAIN)),
    "wide": Batch((64, 64), (150, 64), 2, (tuple(range(63)), _WIDE)),
}
"""The same sizes with other trees after prefixes of other lengths; one more request has joined the first."""
_VARIANTS = (*TELLING_VARIANTS, "gqa", "fp8_cache")
_WINDOW = MAX_TREE_TOKENS
"""The minimum: a tree lies within the window, and begins at its edge."""
_STORED = "write_kv stores each query token of a tree in its own slot and nothing else"

numerics = Family("numerics", covers=with_case())
graph = Family("graph", covers=with_case(CAPTURE, ADVANCE))


def _trees(subject: Subject) -> Iterable[tuple[str, Case]]:
    """Yield a few telling variants that request trees."""
    for name, case in spec_cases(_SHAPES, _VARIANTS)(subject):
        yield name, Case(with_trees(case.spec), case.batch)
        if name.startswith("base-") and case.spec.sliding_window is None:
            windowed = replace(case.spec, tree=True, sliding_window=_WINDOW)
            yield name.replace("base", "window"), Case(windowed, case.batch)


@numerics(
    "a query token of a tree sees the cached tokens, its ancestors and itself, but no siblings or cousins",
    _trees,
    since=(1, 2),
)
def trees_see_their_ancestors(subject: Subject, case: Case) -> Measurements:
    built = BuiltBatch.of(subject, case)
    return built.expect_attention("attention of a tree", cache=_STORED)


@graph(
    "a graph of tree attention reads each replay's masks and lengths, and a spec that allows trees allows chains",
    lambda subject: ((name, case) for name, case in _trees(subject) if name.partition("-")[2] in _OTHERS),
    advances=True,
    since=(1, 2),
)
def tree_replays_over_other_trees(subject: Subject, case: Case) -> Measurements:
    built = BuiltBatch.of(subject, case)
    other = _OTHERS["trees" if len(case.batch.trees) == 3 else "wide"]
    return built.expect_replay(other, "attention of the trees of a replay")
