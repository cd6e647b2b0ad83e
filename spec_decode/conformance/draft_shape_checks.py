"""Family drafter: rounds whose drafts are not a chain of steps (trees and blocks), in every strategy."""

from __future__ import annotations

from functools import partial

from spec_decode.conformance.check import Family
from spec_decode.conformance.coverage import every_strategy
from spec_decode.conformance.draft_runs import compare, draft, without_interpreter
from spec_decode.testing.draft_fixture import DraftFixture
from spec_decode.testing.outcome import Measurements
from spec_decode.testing.plain_draft import PlainBlockDraft
from spec_decode.testing.subject import Subject
from spec_decode.trees import DraftTree, DynamicTreeConfig, Tree

check = Family("drafter", covers=every_strategy)

_TREES: dict[str, tuple[int, int, Tree]] = {
    "k1-n3-dynamic": (1, 3, DynamicTreeConfig(width=4, num_tokens=3)),
    "k4-n3-dynamic": (4, 3, DynamicTreeConfig(width=3, num_tokens=12)),
    "k5-n2-widest": (5, 2, DynamicTreeConfig(width=16, num_tokens=63)),
    "k3-n7-static": (3, 7, DraftTree((0, 0, 0, 1, 1, 2, 4, 4, 5))),
}
_BLOCKS: dict[str, tuple[int, int, Tree | None]] = {
    **{f"k{k}-n{n}": (k, n, None) for k, n in ((1, 3), (4, 3), (7, 7), (16, 2))},
    "k4-n3-dynamic-tree": (4, 3, DynamicTreeConfig(width=3, num_tokens=12)),
    "k16-n2-widest-tree": (16, 2, DynamicTreeConfig(width=32, num_tokens=63)),
    "k3-n7-static-tree": (3, 7, DraftTree((0, 0, 0, 1, 1, 2, 4, 4, 5))),
}


@check(
    "static and dynamic trees, caches and flags have the same bits in every strategy as in eager",
    lambda subject: _TREES.items(),
    since=(1, 2),
)
@without_interpreter
def strategies_agree_on_trees(subject: Subject, case: tuple[int, int, Tree]) -> Measurements:
    steps, num_reqs, tree = case
    fixture = DraftFixture.make(subject, num_reqs, steps, trees=True)
    return {"runs_compared": float(compare(partial(draft, fixture, temperature=1.0, tree=tree))[1])}


@check(
    "one-step blocks, as chains or trees, have the same bits in every strategy as in eager, greedy and sampled",
    lambda subject: _BLOCKS.items(),
    since=(1, 2),
)
@without_interpreter
def strategies_agree_on_blocks(subject: Subject, case: tuple[int, int, Tree | None]) -> Measurements:
    steps, num_reqs, tree = case
    fixture = DraftFixture.make(subject, num_reqs, steps, kind=PlainBlockDraft)
    return {
        "runs_compared": float(sum(compare(partial(draft, fixture, temperature=t, tree=tree))[1] for t in (0.0, 1.0)))
    }
