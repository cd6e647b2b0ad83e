"""How the K-1 decode steps of a round are run, chosen from what each KV group can do; a pure function with reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from builders import AdvanceLevel, AdvanceSupport, GraphSupport, HostLengths


class Strategy(str, Enum):
    """From least host work a round to most."""

    DEVICE_LOOP = "device_loop"
    """One captured step inside a graph's WHILE node: the device decides after each step whether another follows, so one
    graph serves every number of draft tokens, and stops when no request drafts on. No collective may be in the step:
    the event nodes that NCCL captures are illegal in such a body."""
    FULL_LOOP = "full_loop"
    """All K-1 steps in one graph; a group's metadata advances inside it, or was planned for each step before it."""
    PER_STEP = "per_step"
    """One single-step graph replayed K-1 times; weak groups are rebuilt between replays, the others advance inside."""
    PIECEWISE = "piecewise"
    """As per step, but the step is captured in pieces, and the attention of groups that no graph holds runs eagerly
    between them."""
    EAGER = "eager"
    """No graphs; every group is rebuilt at every step. The reference for the others."""


class MetadataUpdate(str, Enum):
    """How a group's metadata is kept current over the steps."""

    IN_GRAPH = "advanced in the graph"
    AHEAD = "planned ahead for every step of a round"
    REBUILT = "rebuilt at every step"


class GraphMode(str, Enum):
    """Where a target model uses graphs, in the words of vLLM, and what follows for its drafter.

    NONE turns the drafter's graphs off. Under every other mode the drafter captures all that its own groups allow: the
    later steps by the strategy chosen, and step 0 where every group can capture a uniform batch, since its queries are
    all 1 + K tokens long.
    """

    NONE = "none"
    PIECEWISE = "piecewise"
    """The target's attention runs outside its graphs. That is a property of the target's backend: the draft's groups
    are asked themselves."""
    FULL = "full"
    FULL_DECODE_ONLY = "full_decode_only"
    """Full graphs for uniform batches, of one or 1 + K tokens a request: the only ones that a drafter's round has."""
    FULL_AND_PIECEWISE = "full_and_piecewise"
    """Full graphs for uniform batches, piecewise ones for mixed, which a drafter's round never has."""


class StrategyError(ValueError):
    """A strategy that was asked for and that some group cannot run; the message holds the group's reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFacts:
    """What the choice needs to know of one KV group."""

    name: str
    backend: str
    graph_support: GraphSupport
    advance: AdvanceSupport
    host_lengths: HostLengths = HostLengths.NONE
    build_per_round: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupDecision:
    """How one group's metadata is kept current."""

    name: str
    backend: str
    upkeep: MetadataUpdate
    waits: bool
    """Whether a build waits for the device, to learn the exact lengths."""
    build_per_round: bool
    outside: bool
    """Whether its attention runs eagerly, between captured pieces."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftPlan:
    """The strategy of a run, each group's part in it, and why nothing cheaper was chosen."""

    strategy: Strategy
    reason: str
    groups: tuple[GroupDecision, ...]
    not_chosen: tuple[tuple[Strategy, str], ...]

    @property
    def rebuild_groups(self) -> tuple[int, ...]:
        """Indices of the groups that are built between steps."""
        return tuple(i for i, group in enumerate(self.groups) if group.upkeep is MetadataUpdate.REBUILT)

    @property
    def preplanned_groups(self) -> tuple[int, ...]:
        """Indices of the groups whose steps are planned before the loop."""
        return tuple(i for i, group in enumerate(self.groups) if group.upkeep is MetadataUpdate.AHEAD)

    @property
    def uncaptured_groups(self) -> tuple[int, ...]:
        """Indices of the groups whose attention runs between captured pieces."""
        return tuple(i for i, group in enumerate(self.groups) if group.outside)

    def explain(self) -> list[str]:
        """The plan in words, one line each."""
        lines = [f"strategy {self.strategy.value}: {self.reason}"]
        lines += [f"not {strategy.value}: {reason}" for strategy, reason in self.not_chosen]
        for group in self.groups:
            cost = ", waiting for the device" if group.waits else ""
            cost += ", built once a round" if group.build_per_round and group.upkeep is MetadataUpdate.IN_GRAPH else ""
            cost += ", attention between the graphs' pieces" if group.outside else ""
            lines.append(f"group {group.name} ({group.backend}): {group.upkeep.value}{cost}; {group.reason}")
        return lines


def choose(
    groups: Sequence[GroupFacts],
    num_speculative_tokens: int,
    graph_mode: GraphMode,
    *,
    forced: Strategy | None = None,
    loop_unsupported_reason: str | None = None,
) -> DraftPlan:
    """The cheapest strategy that every group can run, or the forced one.

    loop_unsupported_reason: why the device cannot capture a loop, if it cannot. The device loop is never chosen by itself.

    Raises StrategyError if the forced strategy is one that a group cannot run: an explicit choice never falls back.
    """
    if num_speculative_tokens < 1:
        raise StrategyError(
            f"a drafter proposes at least 1 token a round, got {num_speculative_tokens}; nothing was planned. Pass 1 "
            "or more, or decode without a drafter."
        )
    obstacles = {
        Strategy.DEVICE_LOOP: _level_obstacle(groups, graph_mode, AdvanceLevel.IN_GRAPH) or loop_unsupported_reason,
        Strategy.FULL_LOOP: _level_obstacle(groups, graph_mode, AdvanceLevel.PREPLANNED),
        Strategy.PER_STEP: _graph_obstacle(groups, graph_mode),
        Strategy.PIECEWISE: _piecewise_obstacle(groups, graph_mode),
        Strategy.EAGER: None,
    }
    if forced is not None and (obstacle := obstacles[forced]):
        raise StrategyError(
            f"strategy {forced.value} was asked for and cannot be run: {obstacle}. Nothing else was chosen in its "
            "place. Ask for another strategy, or change the group's backend."
        )
    chosen = forced or next(strategy for strategy in _REASONS if obstacles[strategy] is None)
    not_chosen = tuple(
        (strategy, obstacles[strategy] or (f"{chosen.value} was asked for" if forced else _DRAWBACKS[strategy]))
        for strategy in Strategy
        if strategy is not chosen
    )
    reason = "asked for" if forced else _REASONS[chosen]
    decisions = tuple(_decide(group, chosen) for group in groups)
    return DraftPlan(strategy=chosen, reason=reason, groups=decisions, not_chosen=not_chosen)


_REASONS = {
    Strategy.FULL_LOOP: "every group's metadata advances in the graph, or is planned ahead",
    Strategy.PER_STEP: "some group must be rebuilt between steps, the others need not pay for it",
    Strategy.PIECEWISE: "the attention of some group cannot be captured, the rest of the step can",
    Strategy.EAGER: "no graph can be used",
}
"""Why each strategy was chosen, in the order in which they are tried."""

_DRAWBACKS = {
    # The full loop is taken wherever it can be run, and so is piecewise, whose obstacle is that PER_STEP can be.
    Strategy.DEVICE_LOOP: "runs where it is asked for; a time round costs the device more than an unrolled step",
    Strategy.PER_STEP: "costs more host work",
    Strategy.EAGER: "costs more host work",
}


def _mode_obstacle(graph_mode: GraphMode) -> str | None:
    return "graphs are turned off" if graph_mode is GraphMode.NONE else None


def _graph_obstacle(groups: Sequence[GroupFacts], graph_mode: GraphMode) -> str | None:
    if obstacle := _mode_obstacle(graph_mode):
        return obstacle
    for group in groups:
        if group.graph_support is GraphSupport.NEVER:
            return f"group {group.name} ({group.backend}) cannot be captured at all"
    return None


def _piecewise_obstacle(groups: Sequence[GroupFacts], graph_mode: GraphMode) -> str | None:
    if obstacle := _mode_obstacle(graph_mode):
        return obstacle
    if all(group.graph_support is not GraphSupport.NEVER for group in groups):
        return "the attention of every group can be captured: there is nothing to cut around"
    return None


def _level_obstacle(groups: Sequence[GroupFacts], graph_mode: GraphMode, least: AdvanceLevel) -> str | None:
    if obstacle := _graph_obstacle(groups, graph_mode):
        return obstacle
    for group in groups:
        if group.advance.level < least:
            return f"group {group.name} ({group.backend}) is {group.advance.level.name}: {group.advance.reason}"
    return None


def _decide(group: GroupFacts, strategy: Strategy) -> GroupDecision:
    upkeep = MetadataUpdate.REBUILT
    if strategy is not Strategy.EAGER and group.advance.level is AdvanceLevel.IN_GRAPH:
        upkeep = MetadataUpdate.IN_GRAPH
    elif strategy is Strategy.FULL_LOOP:
        upkeep = MetadataUpdate.AHEAD
    built = upkeep is not MetadataUpdate.IN_GRAPH or group.build_per_round
    return GroupDecision(
        name=group.name,
        backend=group.backend,
        upkeep=upkeep,
        waits=built and group.host_lengths is HostLengths.EXACT,
        build_per_round=group.build_per_round,
        outside=strategy is Strategy.PIECEWISE and group.graph_support is GraphSupport.NEVER,
        reason=group.advance.reason,
    )
