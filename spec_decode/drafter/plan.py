"""Choose the strategy for a round's later steps from what each KV group supports: a pure function, with reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from builders import GraphSupport
from spec_decode.drafter.config import DrafterConfig
from spec_decode.drafter.strategies import Strategy
from spec_decode.graphs import loop_unsupported_reason
from spec_decode.model_api import DraftModel
from spec_decode.paged.kv_groups import KVGroup
from spec_decode.paged.metadata_plan import GraphMode, GroupFacts, GroupPlan, MetadataPlan

_NO_LATER_STEPS = "this draft proposes all its tokens in one step and has no later steps"


class StrategyError(ValueError):
    """Raised if a group cannot run the requested strategy, with the group's reason, or if no plan is possible."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftPlan(MetadataPlan):
    """The chosen strategy, each group's part in the later steps, and why nothing cheaper was chosen."""

    strategy: Strategy
    reason: str
    not_chosen: tuple[tuple[Strategy, str], ...]
    unsupported: Mapping[Strategy, str]
    """The reason for each strategy that cannot run over these groups."""

    def __str__(self) -> str:
        return f"{self.strategy.value}: {self.reason}"

    def explain(self) -> list[str]:
        """Return the plan in words, one line per fact."""
        return [
            f"strategy {self}",
            *(f"not {strategy.value}: {reason}" for strategy, reason in self.not_chosen),
            *(group.explain() for group in self.groups),
        ]


def choose_strategy(
    groups: Sequence[GroupFacts],
    num_speculative_tokens: int,
    graph_mode: GraphMode,
    *,
    forced: Strategy | None = None,
    loop_unsupported_reason: str | None = None,
    at_once: bool = False,
    tree: bool = False,
) -> DraftPlan:
    """Plan the strategy with the least host work that every group supports, or the forced one.

    loop_unsupported_reason: why the device cannot capture a loop; None if it can. at_once: the draft proposes all its
    tokens in step 0. tree: later steps have several tokens per request.

    Raises StrategyError for no groups, for a K below 1, and for a forced strategy that a group cannot run: an explicit
    choice never falls back.
    """
    if not groups:
        raise StrategyError(
            "a plan needs at least one KV group, got none. Pass the facts of each of the draft's groups."
        )
    if num_speculative_tokens < 1:
        raise StrategyError(
            f"num_speculative_tokens is {num_speculative_tokens}. Pass 1 or more, or decode without a drafter."
        )
    unsupported = {
        strategy: reason
        for strategy in Strategy
        if (reason := strategy.implementation.unsupported_reason(groups, graph_mode, loop_unsupported_reason))
    }
    if tree and not at_once and (reason := _tree_unsupported_reason(groups)):
        unsupported |= {s: reason for s in Strategy if s.implementation.uses_graphs}
    if at_once:
        unsupported |= {s: _NO_LATER_STEPS for s in Strategy if s.implementation.needs_later_steps}
    if forced is not None and forced in unsupported:
        raise StrategyError(
            f"strategy {forced.value} cannot run: {unsupported[forced]}. Choose another strategy, or change the "
            "group's backend."
        )
    chosen = forced or next(s for s in Strategy if s.implementation.automatic and s not in unsupported)
    requested = f"{chosen.value} was requested" if forced else None
    implementation = chosen.implementation
    return DraftPlan(
        strategy=chosen,
        reason="requested" if forced else implementation.chosen_because,
        not_chosen=tuple(
            (s, unsupported.get(s) or requested or s.implementation.drawback) for s in Strategy if s is not chosen
        ),
        unsupported=unsupported,
        groups=tuple(
            GroupPlan(
                facts=group,
                update=implementation.metadata_update(group),
                uncaptured=implementation.uncaptured_reason(group),
            )
            for group in groups
        ),
    )


def plan_draft(model: DraftModel, groups: Sequence[KVGroup], device: torch.device, config: DrafterConfig) -> DraftPlan:
    """Plan a drafter. Raises StrategyError as `choose_strategy` does."""
    return choose_strategy(
        [group.facts(device) for group in groups],
        config.num_speculative_tokens,
        config.graph_mode,
        forced=config.strategy,
        loop_unsupported_reason=loop_unsupported_reason(device),
        at_once=model.drafts_at_once,
        tree=config.tree is not None,
    )


def _tree_unsupported_reason(groups: Sequence[GroupFacts]) -> str | None:
    """Return why no graph can hold a step over trees; None if one can."""
    unable = [group for group in groups if group.graph_support < GraphSupport.UNIFORM_BATCH]
    return f"{unable[0].describe()} captures steps of one token per request; a tree has more" if unable else None
