"""One single-step graph, replayed for every later step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spec_decode.drafter.strategies.base import DraftStrategy, capture_unsupported_reason
from spec_decode.graphs import Capturable, Factory
from spec_decode.paged.metadata_plan import GraphMode, GroupFacts


class PerStep(DraftStrategy):
    """Rebuilds on the host, between replays, the groups that need it; the others advance inside the graph."""

    chosen_because = "a group must be rebuilt between steps; the others advance in the graph"

    @classmethod
    def unsupported_reason(
        cls, groups: Sequence[GroupFacts], graph_mode: GraphMode, loop_unsupported_reason: str | None
    ) -> str | None:
        return capture_unsupported_reason(groups, graph_mode)

    def capturables(self) -> Mapping[str, Factory]:
        return {self.graph_kind: self._capturable}

    def _capturable(self, size: int) -> Capturable:
        step, buffers = self._step, self._buffers

        def run() -> None:
            buffers.advance_metadata()
            step.run_later_step_in_place(size, buffers.attention)

        return Capturable(run, buffers.prepare_capture(size))

    def run_later_steps(self, size: int, num_steps: int) -> None:
        buffers = self._buffers
        buffers.build_round_metadata(size)
        for _ in range(num_steps):
            self._step.advance_state(size)
            buffers.build_step_metadata(size)
            self._replay(size)
