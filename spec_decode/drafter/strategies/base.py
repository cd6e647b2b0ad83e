"""The strategy interface: what a strategy supports, captures and runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Protocol

import torch

from builders import AdvanceLevel, GraphSupport
from spec_decode.graphs import Capturable, Factory, GraphManager
from spec_decode.model_api import Attention
from spec_decode.paged.kv_groups import KVGroup
from spec_decode.paged.metadata_plan import GraphMode, GroupFacts, MetadataUpdate
from spec_decode.paged.step_metadata import StepBuffers
from spec_decode.sampling.draft_sampler import DraftSettings

GRAPHS_OFF = "graphs are turned off"


class LaterSteps(Protocol):
    """The later steps of a draft, which a strategy runs.

    step_0, decode  StepBuffers of step 0 and of a later step
    hidden          [R, H], the states that the next later step starts from
    """

    num_speculative_tokens: int
    groups: tuple[KVGroup, ...]
    step_0: StepBuffers
    decode: StepBuffers
    hidden: torch.Tensor

    @property
    def sampler(self) -> DraftSettings:
        """Holds the drafted tokens."""
        ...

    def advance_state(self, size: int) -> None:
        """Advance the state of the first `size` rows to the next later step."""
        ...

    def run_later_step(self, size: int, hidden: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Run a later step from the previous hidden states [size, H]; return the new ones, of the same shape."""
        ...

    def run_later_step_in_place(self, size: int, attention: Attention) -> None:
        """Run a later step that reads and overwrites `hidden`."""
        ...


class DraftStrategy(ABC):
    """One way to run the later steps of a round: steps 1 to K - 1, over one token or a tree per request."""

    chosen_because: ClassVar[str] = "it was requested"
    drawback: ClassVar[str] = "costs more host work"
    """Why it is not chosen although it could run."""
    automatic: ClassVar[bool] = True
    """Whether it can be chosen without being requested."""
    uses_graphs: ClassVar[bool] = True
    needs_later_steps: ClassVar[bool] = False
    """Whether it is unsupported for a draft that proposes all its tokens in step 0."""
    fallback_update: ClassVar[MetadataUpdate] = MetadataUpdate.REBUILD
    """How it keeps a group's metadata current if it cannot advance in its graphs."""
    graph_kind: ClassVar[str] = "step"
    """The graph kind of its later steps."""
    separate_graph_reason: ClassVar[str | None] = "it replays a graph for each later step"
    """Why the target step cannot join the graph of its later steps; None if it can."""

    def __init__(self, step: LaterSteps, graphs: GraphManager, *, loop_steps: int = 1) -> None:
        """loop_steps: see DrafterConfig."""
        self._step = step
        self._loop_steps = loop_steps
        self._buffers = step.decode
        self._graphs = graphs

    @classmethod
    @abstractmethod
    def unsupported_reason(
        cls, groups: Sequence[GroupFacts], graph_mode: GraphMode, loop_unsupported_reason: str | None
    ) -> str | None:
        """Return why it cannot run over these groups on this device; None if it can."""

    @classmethod
    def metadata_update(cls, group: GroupFacts) -> MetadataUpdate:
        """Return how it keeps this group's metadata current."""
        advances = cls.uses_graphs and group.advance.level is AdvanceLevel.IN_GRAPH
        return MetadataUpdate.IN_GRAPH if advances else cls.fallback_update

    @classmethod
    def uncaptured_reason(cls, group: GroupFacts) -> str | None:
        """Return why it runs this group's attention between captured pieces; None if a graph holds it."""
        return None

    @abstractmethod
    def capturables(self) -> Mapping[str, Factory]:
        """Return what it captures of a later step, by graph kind."""

    def joined(self, step_0: Factory) -> Factory | None:
        """Return what it captures of a whole round, all steps included; None if step 0 has a separate graph."""
        return None

    @abstractmethod
    def run_later_steps(self, size: int, num_steps: int) -> None:
        """Run the next num_steps later steps for `size` padded rows, from the state that step 0 left.

        Raises BatchError, with nothing replayed, if no captured graph can serve the batch.
        """

    def _replay(self, size: int) -> None:
        self._buffers.replay(self._graphs, self.graph_kind, size)


def capture_unsupported_reason(groups: Sequence[GroupFacts], graph_mode: GraphMode) -> str | None:
    """Return why a step over these groups cannot be captured as a whole; None if it can."""
    if graph_mode is GraphMode.NONE:
        return GRAPHS_OFF
    for group in groups:
        if group.graph_support is GraphSupport.NEVER:
            return f"{group.describe()} cannot be captured at all"
    return None


def advance_unsupported_reason(groups: Sequence[GroupFacts], graph_mode: GraphMode, least: AdvanceLevel) -> str | None:
    """Return why the later steps cannot be captured as one graph, which takes this advance level; None if they can."""
    if reason := capture_unsupported_reason(groups, graph_mode):
        return reason
    for group in groups:
        if group.advance.level < least:
            return f"{group.describe()} is {group.advance.level.name}: {group.advance.reason}"
    return None


class LoopStrategy(DraftStrategy):
    """All later steps in one graph, preceded by step 0 if the host builds no metadata for the round."""

    graph_kind = "loop"

    def joined(self, step_0: Factory) -> Factory | None:
        """See the base; None if the host builds metadata for the round."""
        if self._step.step_0.built_groups or self._buffers.built_groups:
            return None

        def whole(size: int) -> Capturable:
            first = step_0(size)
            later = self._after(size, first.run)
            # The width of step 0, and the smaller of the two length bounds.
            max_seq_len = min(first.constants.max_seq_len, later.constants.max_seq_len)
            return replace(later, constants=replace(first.constants, max_seq_len=max_seq_len))

        return whole

    def capturables(self) -> Mapping[str, Factory]:
        """See the base: one graph of every later step."""
        return {self.graph_kind: lambda size: self._after(size, lambda: None)}

    @abstractmethod
    def _after(self, size: int, before: Callable[[], object]) -> Capturable:
        """Return every later step of `size` rows, preceded by `before`."""

    def run_later_steps(self, size: int, num_steps: int) -> None:
        """See the base; the graph, or the device, knows the number of steps."""
        self._buffers.build_round_metadata(size)
        self._replay(size)
