"""Metadata for FlashMLA over window lists: the lists, and the schedule of a batch shape."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch

from builders.batch import AttentionBatch
from builders.contract import AdvanceLevel, AdvanceSupport
from builders.sparse_window import SparseWindowBuilder, SparseWindowMetadata
from builders.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class FlashMlaSchedule:
    """How FlashMLA spreads the tokens of a batch over the device. Made by its first call, from shapes only."""

    num_tokens: int
    made: Any = field(compare=False, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashMlaSparseMetadata(SparseWindowMetadata):
    """Window lists padded with -1, and a schedule for lists of full width, which does not depend on lengths."""

    schedule: FlashMlaSchedule


class FlashMlaSparseBuilder(SparseWindowBuilder):
    """Lists windows, but does not pass their lengths to the kernel, so that one schedule holds for every step.

    A schedule made for lengths would be wrong as soon as one of them crosses a multiple of 64.
    """

    def allocate(self) -> None:
        super().allocate()
        self._schedules: dict[int, FlashMlaSchedule] = {}

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "window lists are recomputed by one kernel; the schedule stays")

    def metadata_of(self, batch: AttentionBatch) -> FlashMlaSparseMetadata:
        if batch.num_tokens not in self._schedules:
            made = self.make_schedule(batch.num_tokens)
            self._schedules[batch.num_tokens] = FlashMlaSchedule(batch.num_tokens, made)
        return FlashMlaSparseMetadata(**self.batch_fields(batch), schedule=self._schedules[batch.num_tokens])

    @abstractmethod
    def make_schedule(self, num_tokens: int) -> Any:
        """Have the kernel schedule num_tokens query tokens over lists of full width. Called by `build` only, because a
        schedule made during a capture would belong to the graph."""
