"""Which strategy runs a round's later steps, chosen from what each KV group can do: a pure function with reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spec_decode.drafter.metadata_plan import GraphMode, GroupFacts, GroupPlan, MetadataPlan
from spec_decode.drafter.strategies import Strategy


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
) -> DraftPlan:
    """The strategy with the least host work that every group can run, or the forced one.

    loop_unsupported_reason: why the device cannot capture a loop; None where it can.

    Raises StrategyError for no groups, and if the forced strategy is one that a group cannot run: an explicit choice
    never falls back.
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
    unsupported = {
        strategy: strategy.implementation.unsupported_reason(groups, graph_mode, loop_unsupported_reason)
        for strategy in Strategy
    }
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
