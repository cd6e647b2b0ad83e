"""No graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spec_decode.drafter.strategies.base import DraftStrategy
from spec_decode.graphs import Factory
from spec_decode.paged.metadata_plan import GraphMode, GroupFacts


class Eager(DraftStrategy):
    """Rebuilds every group's metadata at every step. The reference for the other strategies."""

    chosen_because = "no graph can be used"
    uses_graphs = False

    @classmethod
    def unsupported_reason(
        cls, groups: Sequence[GroupFacts], graph_mode: GraphMode, loop_unsupported_reason: str | None
    ) -> None:
        return None

    def capturables(self) -> Mapping[str, Factory]:
        return {}

    def run_later_steps(self, size: int, num_steps: int) -> None:
        step, buffers = self._step, self._buffers
        for _ in range(num_steps):
            step.advance_state(size)
            buffers.build_step_metadata(size)
            step.run_later_step_in_place(size, buffers.attention)
