"""The checks of the kit that our code around a backend's kernels can fail where the CPU does not run the kernels."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from fnmatch import fnmatch

from attn_backends import AttentionBackend
from spec_decode.conformance import Check, iter_checks
from tests.factories import CPU

KIT = ("contract.*", "builder.*", "poison.*", "graph.*", "refusal.*")
"""Every family but those of attention alone and of whole rounds."""
_TELLING = {
    "drafter.drafts_resume_after_a_pause": "k1-n2",
    "drafter.requests_stop_on_their_own": "k2-n3",
    "drafter.strategies_agree": "k1-n32 k2-n2 k4-n7",
    "drafter.strategies_agree_on_blocks": "k7-n7 k3-n7-static-tree k4-n3-dynamic-tree",
    "drafter.strategies_agree_on_layers_and_groups": "k3-n2-groups",
    "drafter.strategies_agree_on_trees": "k3-n7-static k4-n3-dynamic",
    "builder.drawn_advances_mean_a_rebuild": "s0-[01]*",
    "graph.drawn_replays_are_right": "s0-[01]*",
    "numerics.drawn_attention_is_right": "s0-0[0-4]*",
    "builder.advance_attends_right": "base-single window-decode deepseek_v3-decode page_4-*",
    "builder.advance_refreshes_another_batch": "base-verify window-decode deepseek_v3-decode page_64-* page_128-*",
    "graph.blocks_replay_over_other_batches": "base-* window-* mqa-* page_*",
    "graph.loop_replays_over_other_batches": "base-decode",
    "graph.replay_equals_eager": "base-few window-decode deepseek_v3-decode",
    "graph.tree_replays_over_other_trees": "base-* gqa-trees page_*-trees",
    "graph.two_sizes_interleave": "base-few",
    "numerics.attention_is_right": "base-* *-decode *-ragged",
    "numerics.blocks_see_what_is_behind": "base-* window-* *-block",
    "numerics.edges_are_right": "[!r]* rows_96",
    "numerics.trees_see_their_ancestors": "base-* *-ragged",
    "poison.*": "base-* window-decode",
}
"""Cases, by check, that differ to our code around kernels which the CPU does not run: how a spec's numbers reach the
kernels shows in one batch of each kind; how a replay follows its batch, in one spec of each page size, group of heads
and window. How many rows a kernel takes is the kernel's to show, how strategies run the reference's."""


def telling(checks: Iterable[Check]) -> list[Check]:
    """Return those of a backend's checks that are on the telling cases: never none of a check's."""
    found: dict[str, list[Check]] = {}
    for check in checks:
        found.setdefault(check.name, []).append(check)
    return [check for name, cases in found.items() for check in _told_apart(name, cases)]


def telling_checks(backend: AttentionBackend, *patterns: str) -> list[str]:
    """Return patterns of the telling checks whose name or id matches one of these."""
    return [
        f"{check.name}[[]{glob.escape(check.case)}[]]"
        for check in telling(iter_checks(backend, device=CPU))
        if any(fnmatch(check.id, pattern) or fnmatch(check.name, pattern) for pattern in patterns)
    ]


def _told_apart(name: str, checks: list[Check]) -> list[Check]:
    wanted = next((wanted for pattern, wanted in _TELLING.items() if fnmatch(name, pattern)), "*").split()
    return [check for check in checks if any(fnmatch(check.case, each) for each in wanted)] or checks
