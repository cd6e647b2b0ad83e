"""How each KV group's metadata is kept current and why: one plan for drafter and target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from attn_backends import AttentionBackend, StateBackend
from builders import AdvanceLevel, AdvanceSupport, AttentionSpec, GraphSupport, HostLengths, StateSpec


class GraphMode(str, Enum):
    """What the graphs of a target's or a drafter's steps hold."""

    NONE = "none"
    """Nothing: every step runs eagerly."""
    PIECEWISE = "piecewise"
    """The target's step without its attention, which runs between the pieces of the graph. Means FULL for a drafter."""
    FULL = "full"
    """All that the groups allow. A target's step, and step 0 of a draft, needs groups that can capture a uniform batch:
    all its queries are 1 + K tokens long. Later steps are captured by the drafter's strategy."""


class MetadataUpdate(str, Enum):
    """How a group's metadata is kept current over the steps."""

    IN_GRAPH = "advanced in the graph"
    PREPLANNED = "planned ahead for every step of a round"
    REBUILD = "rebuilt at every step"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFacts:
    """The facts about one KV group that a plan depends on."""

    name: str
    backend: str
    graph_support: GraphSupport
    advance: AdvanceSupport
    host_lengths: HostLengths = HostLengths.NONE
    build_per_round: bool = False

    @classmethod
    def of(
        cls, name: str, backend: AttentionBackend | StateBackend, spec: AttentionSpec | StateSpec, device: torch.device
    ) -> GroupFacts:
        """Return the facts about a group with this backend and spec on a device."""
        builder: Any = backend.builder
        return cls(
            name=name,
            backend=backend.name,
            graph_support=builder.graph_support,
            advance=builder.advance_support(spec, device),
            host_lengths=builder.host_lengths,
            build_per_round=builder.build_per_round,
        )

    def describe(self) -> str:
        """Return the group's name and its backend."""
        return f"group {self.name} ({self.backend})"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """One group's part in a plan."""

    facts: GroupFacts
    update: MetadataUpdate
    uncaptured: str | None
    """Why its attention runs eagerly between the pieces of a graph; None if a graph holds it."""

    @property
    def built_per_round(self) -> bool:
        """Whether it is built at the start of a round and then advanced in the graph."""
        return self.facts.build_per_round and self.update is MetadataUpdate.IN_GRAPH

    @property
    def built(self) -> bool:
        """Whether the host builds its metadata at any point in a round."""
        return self.facts.build_per_round or self.update is not MetadataUpdate.IN_GRAPH

    @property
    def waits(self) -> bool:
        """Whether a build syncs with the device to read exact lengths."""
        return self.built and self.facts.host_lengths is HostLengths.EXACT

    def explain(self) -> str:
        """Describe this part, with the reason for everything that costs host time."""
        costs = [self.update.value]
        if self.waits:
            costs.append("waiting for the device (a build needs exact lengths)")
        if self.built_per_round:
            costs.append("built once per round (its builder requires it)")
        if self.uncaptured:
            costs.append(f"attention between the graphs' pieces ({self.uncaptured})")
        return f"{self.facts.describe()}: {', '.join(costs)}; {self.facts.advance.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MetadataPlan:
    """The plan of one batch shape: one part per group, in group order."""

    groups: tuple[GroupPlan, ...]

    @property
    def preplanned_groups(self) -> tuple[int, ...]:
        """Indices of the groups whose steps are planned before the loop."""
        return self._indices(lambda group: group.update is MetadataUpdate.PREPLANNED)

    @property
    def rebuild_groups(self) -> tuple[int, ...]:
        """Indices of the groups that are built before every step."""
        return self._indices(lambda group: group.update is MetadataUpdate.REBUILD)

    @property
    def built_groups(self) -> tuple[int, ...]:
        """Indices of the groups that the host builds at any point in a round."""
        return self._indices(lambda group: group.built)

    @property
    def uncaptured_groups(self) -> tuple[int, ...]:
        """Indices of the groups whose attention runs between captured pieces."""
        return self._indices(lambda group: group.uncaptured is not None)

    @property
    def host_reason(self) -> str | None:
        """Why the host does work between the replays of these steps; None if it only launches them."""
        for group in self.groups:
            if group.uncaptured:
                return f"the attention of {group.facts.describe()} runs between the graph's pieces ({group.uncaptured})"
            if group.built:
                return f"the host builds the metadata of {group.facts.describe()} in every round"
        return None

    def explain(self) -> list[str]:
        """Describe the plan, one line per group."""
        return [group.explain() for group in self.groups]

    def _indices(self, has: Callable[[GroupPlan], bool]) -> tuple[int, ...]:
        return tuple(index for index, group in enumerate(self.groups) if has(group))


def plan_uniform_step(groups: Sequence[GroupFacts], query_len: int, graph_mode: GraphMode) -> MetadataPlan:
    """Plan one step over query_len tokens of every request with no step after it: a target's step, or step 0.

    NONE runs it eagerly. PIECEWISE runs the attention of every group between the pieces of a graph; FULL does so only
    for groups that cannot capture a batch of this shape.
    """
    needed = GraphSupport.UNIFORM_BATCH if query_len > 1 else GraphSupport.SINGLE_TOKEN_DECODE

    def plan(group: GroupFacts) -> GroupPlan:
        if graph_mode is GraphMode.NONE:
            return GroupPlan(facts=group, update=MetadataUpdate.REBUILD, uncaptured=None)
        uncaptured = "graph mode piecewise" if graph_mode is GraphMode.PIECEWISE else None
        if group.graph_support < needed:
            uncaptured = f"a graph needs {needed.name}, its builder supports {group.graph_support.name}"
        advances = group.advance.level is AdvanceLevel.IN_GRAPH
        update = MetadataUpdate.IN_GRAPH if advances else MetadataUpdate.REBUILD
        return GroupPlan(facts=group, update=update, uncaptured=uncaptured)

    return MetadataPlan(groups=tuple(map(plan, groups)))
