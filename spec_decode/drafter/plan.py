"""Which strategy runs a round's later steps, chosen from what each KV group can do: a pure function with reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from builders import GraphSupport
from spec_decode.drafter.strategies import Strategy
from spec_decode.paged.metadata_plan import GraphMode, GroupFacts, GroupPlan, MetadataPlan

_NO_LATER_STEPS = "this draft proposes all its tokens in one step, and has no later ones"


class StrategyError(ValueError):
    """A strategy that was asked for and that some group cannot run; the message holds the group's reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftPlan(MetadataPlan):
    """The strategy of a run, each group's part in the later steps, and why nothing cheaper was chosen."""

    strategy: Strategy
    reason: str
    not_chosen: tuple[tuple[Strategy, str], ...]

    def explain(self) -> list[str]:
        """The plan in words, one line each."""
        return [
            f"strategy {self.strategy.value}: {self.reason}",
            *(f"not {strategy.value}: {reason}" for strategy, reason in self.not_chosen),
            *(group.explain() for group in self.groups),
        ]


def choose(
    groups: Sequence[GroupFacts],
    num_speculative_tokens: int,
    graph_mode: GraphMode,
    *,
    forced: Strategy | None = None,
    loop_unsupported_reason: str | None = None,
    at_once: bool = False,
    tree: bool = False,
) -> DraftPlan:
    """The strategy with the least host work that every group can run, or the forced one.

    loop_unsupported_reason: why the device cannot capture a loop; None where it can. at_once: the draft proposes all
    its tokens in step 0. tree: later steps have several tokens a request.

    Raises StrategyError for no groups, for a tree of a draft that has no later steps, and if the forced strategy is one
    that a group cannot run: an explicit choice never falls back.
    """
    if not groups:
        raise StrategyError(
            "a plan needs at least one KV group, got none; every strategy would be able to run nothing, so nothing was "
            "planned. Pass the facts of each of the draft's groups."
        )
    if num_speculative_tokens < 1:
        raise StrategyError(
            f"a drafter proposes at least 1 token a round, got {num_speculative_tokens}; nothing was planned. Pass 1 "
            "or more, or decode without a drafter."
        )
    if at_once and tree:
        raise StrategyError(
            "a tree needs a draft that goes step by step, this one proposes its tokens in one step; a token's children "
            "would never be drafted, so nothing was planned. Draft no tree, or use another draft."
        )
    unsupported = {
        strategy: strategy.implementation.unsupported_reason(groups, graph_mode, loop_unsupported_reason)
        for strategy in Strategy
    }
    if tree:
        unsupported |= {s: reason for s in Strategy if s.implementation.uses_graphs and (reason := _no_trees(groups))}
    if at_once:
        unsupported |= {s: _NO_LATER_STEPS for s in Strategy if s.implementation.needs_later_steps}
    if forced is not None and (reason := unsupported[forced]):
        raise StrategyError(
            f"strategy {forced.value} was asked for and cannot be run: {reason}. Nothing else was chosen in its "
            "place. Ask for another strategy, or change the group's backend."
        )
    chosen = forced or next(s for s in Strategy if s.implementation.automatic and unsupported[s] is None)
    asked = f"{chosen.value} was asked for" if forced else None
    not_chosen = tuple(
        (strategy, unsupported[strategy] or asked or strategy.implementation.drawback)
        for strategy in Strategy
        if strategy is not chosen
    )
    implementation = chosen.implementation
    return DraftPlan(
        strategy=chosen,
        reason="asked for" if forced else implementation.chosen_because,
        groups=tuple(
            GroupPlan(
                facts=group,
                update=implementation.metadata_update(group),
                uncaptured=implementation.uncaptured_reason(group),
            )
            for group in groups
        ),
        not_chosen=not_chosen,
    )


def _no_trees(groups: Sequence[GroupFacts]) -> str | None:
    """Why no graph can hold a step over trees; None where one can."""
    unable = [group for group in groups if group.graph_support < GraphSupport.UNIFORM_BATCH]
    return f"{unable[0].describe()} captures steps of one token a request, a tree has more" if unable else None
