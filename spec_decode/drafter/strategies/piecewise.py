"""One later step, captured in pieces around attention that cannot be captured."""

from __future__ import annotations

from collections.abc import Sequence

from builders import GraphSupport
from spec_decode.drafter.strategies.base import GRAPHS_OFF
from spec_decode.drafter.strategies.per_step import PerStep
from spec_decode.graphs import Capturable, SplitOp
from spec_decode.paged.metadata_plan import GraphMode, GroupFacts


class Piecewise(PerStep):
    """Like PerStep, but attention that cannot be captured runs eagerly between the captured pieces."""

    needs_later_steps = True
    chosen_because = "a group's attention cannot be captured; the rest of the step can"

    @classmethod
    def unsupported_reason(
        cls, groups: Sequence[GroupFacts], graph_mode: GraphMode, loop_unsupported_reason: str | None
    ) -> str | None:
        if graph_mode is GraphMode.NONE:
            return GRAPHS_OFF
        if all(cls.uncaptured_reason(group) is None for group in groups):
            return "every group's attention can be captured, so there is nothing to split the graph around"
        return None

    @classmethod
    def uncaptured_reason(cls, group: GroupFacts) -> str | None:
        return "it cannot be captured" if group.graph_support is GraphSupport.NEVER else None

    def _capturable(self, size: int) -> Capturable:
        step, buffers = self._step, self._buffers

        def run(split_op: SplitOp) -> None:
            buffers.advance_metadata()
            step.run_later_step_in_place(size, buffers.split_attention(split_op))

        return Capturable.pieces(run, buffers.prepare_capture(size))
