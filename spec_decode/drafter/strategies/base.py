"""What a strategy says of itself, captures and runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Protocol

import torch

from builders import AdvanceLevel, GraphSupport
from spec_decode.graphs import Capturable, Factory, GraphManager
from spec_decode.models.attention import Attention
from spec_decode.paged.kv_groups import KVGroup
from spec_decode.paged.metadata_plan import GraphMode, GroupFacts, MetadataUpdate
from spec_decode.paged.step_buffers import StepBuffers
from spec_decode.sampling.draft_sampler import DraftSettings

GRAPHS_OFF = "graphs are turned off"


class LaterSteps(Protocol):
    """What a strategy runs: the later steps of a draft that has any.

    extend, decode  StepBuffers of step 0 and of a later step
    hidden          [R, H], what the next later step starts from
    """

    num_speculative_tokens: int
    groups: tuple[KVGroup, ...]
    extend: StepBuffers
    decode: StepBuffers
    hidden: torch.Tensor

    @property
    def sampler(self) -> DraftSettings:
        """Which holds what was drafted."""
        ...

    def advance_state(self, size: int) -> None:
        """Move the state of the first `size` rows on to the next later step."""
        ...

    def run_later_step(self, size: int, hidden: torch.Tensor, attention: Attention) -> torch.Tensor:
        """A later step from the last one's hidden states [size, H]; returns its own, of the same shape."""
        ...

    def run_later_step_in_place(self, size: int, attention: Attention) -> None:
        """A later step that leaves its hidden states in `hidden`, where the next one starts from."""
        ...


class DraftStrategy(ABC):
    """One way to run the later steps of a round: steps 1 to K - 1, of one token a request or of its tree."""

    chosen_because: ClassVar[str] = "it was asked for"
    drawback: ClassVar[str] = "costs more host work"
    """Why it is not chosen where it could run."""
    automatic: ClassVar[bool] = True
    """Whether it may be chosen without being asked for."""
    autotuned: ClassVar[bool] = True
    """Whether autotuning measures it where it can run: False for what is never the fastest."""
    uses_graphs: ClassVar[bool] = True
    needs_later_steps: ClassVar[bool] = False
    """Whether it does nothing for a draft whose tokens all come from step 0."""
    otherwise: ClassVar[MetadataUpdate] = MetadataUpdate.REBUILD
    """How it keeps the metadata of a group current that cannot advance in its graphs."""
    graph_kind: ClassVar[str] = "step"
    """The kind of its graphs of later steps."""
    apart_reason: ClassVar[str | None] = "it replays a graph for each later step"
    """Why the target's step cannot follow in the graph of its later steps; None where it can."""

    def __init__(self, step: LaterSteps, graphs: GraphManager, *, loop_steps: int = 1) -> None:
        """loop_steps: as DrafterConfig has it."""
        self._step = step
        self._loop_steps = loop_steps
        self._buffers = step.decode
        self._graphs = graphs

    @classmethod
    @abstractmethod
    def unsupported_reason(
        cls, groups: Sequence[GroupFacts], graph_mode: GraphMode, loop_unsupported_reason: str | None
    ) -> str | None:
        """Why it cannot run over these groups on this device; None where it can."""

    @classmethod
    def metadata_update(cls, group: GroupFacts) -> MetadataUpdate:
        """How it keeps the metadata of such a group current."""
        advances = cls.uses_graphs and group.advance.level is AdvanceLevel.IN_GRAPH
        return MetadataUpdate.IN_GRAPH if advances else cls.otherwise

    @classmethod
    def uncaptured_reason(cls, group: GroupFacts) -> str | None:
        """Why it runs such a group's attention between captured pieces; None where a graph holds it."""
        return None

    @abstractmethod
    def capturables(self) -> Mapping[str, Factory]:
        """What it captures of a later step, by the kind of graph."""

    def joined(self, step_0: Factory) -> Factory | None:
        """What it captures of a whole round, step 0 and every later one; None where step 0 runs apart from them."""
        return None

    @abstractmethod
    def run_later_steps(self, size: int, num_steps: int) -> None:
        """Run the next num_steps later steps of `size` padded rows, from the state that step 0 left.

        Raises BatchError, with nothing replayed, where no captured graph can serve the batch.
        """

    def _replay(self, size: int) -> None:
        self._buffers.replay(self._graphs, self.graph_kind, size)


def capture_unsupported_reason(groups: Sequence[GroupFacts], graph_mode: GraphMode) -> str | None:
    """Why a step over these groups cannot be captured as a whole; None where it can."""
    if graph_mode is GraphMode.NONE:
        return GRAPHS_OFF
    for group in groups:
        if group.graph_support is GraphSupport.NEVER:
            return f"{group.describe()} cannot be captured at all"
    return None


def advance_unsupported_reason(groups: Sequence[GroupFacts], graph_mode: GraphMode, least: AdvanceLevel) -> str | None:
    """Why not all later steps can be captured with groups that advance at this level or above; None where they can."""
    if reason := capture_unsupported_reason(groups, graph_mode):
        return reason
    for group in groups:
        if group.advance.level < least:
            return f"{group.describe()} is {group.advance.level.name}: {group.advance.reason}"
    return None


class LoopStrategy(DraftStrategy):
    """All later steps in one graph, with step 0 before them where the host builds nothing of the round."""

    graph_kind = "loop"

    def joined(self, step_0: Factory) -> Factory | None:
        """See the base: where the host builds nothing of the round."""
        if self._step.extend.built_groups or self._buffers.built_groups:
            return None

        def whole(size: int) -> Capturable:
            first = step_0(size)
            later = self._after(size, first.run)
            # As wide as step 0, and as long as the shorter bound of the two.
            max_seq_len = min(first.constants.max_seq_len, later.constants.max_seq_len)
            return replace(later, constants=replace(first.constants, max_seq_len=max_seq_len))

        return whole

    def capturables(self) -> Mapping[str, Factory]:
        """See the base: every later step after nothing else."""
        return {self.graph_kind: lambda size: self._after(size, lambda: None)}

    @abstractmethod
    def _after(self, size: int, before: Callable[[], object]) -> Capturable:
        """Every later step of `size` rows after something else."""

    def run_later_steps(self, size: int, num_steps: int) -> None:
        """The graph, or the device, knows the number of steps."""
        self._buffers.build_round_metadata(size)
        self._replay(size)
