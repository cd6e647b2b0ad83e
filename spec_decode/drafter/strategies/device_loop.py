"""One captured step inside a graph's WHILE node."""

from __future__ import annotations

from collections.abc import Sequence

from builders import AdvanceLevel
from spec_decode.drafter.metadata_plan import GraphMode, GroupFacts
from spec_decode.drafter.strategies.base import DraftStrategy, advance_unsupported_reason
from spec_decode.graphs import Capturable


class DeviceLoop(DraftStrategy):
    """The device decides after each step whether another follows.

    One graph serves every number of draft tokens, and stops when no request drafts on. No collective may be in the
    step: the event nodes that NCCL captures are illegal in such a body.
    """

    needs_later_steps = True
    drawback = "runs where it is asked for; an iteration costs the device more than an unrolled step"
    automatic = False
    graph_kind = "loop"

    @classmethod
    def unsupported_reason(
        cls, groups: Sequence[GroupFacts], graph_mode: GraphMode, loop_unsupported_reason: str | None
    ) -> str | None:
        return advance_unsupported_reason(groups, graph_mode, AdvanceLevel.IN_GRAPH) or loop_unsupported_reason

    def _capturable(self, size: int) -> Capturable:
        step, buffers = self._step, self._buffers

        def body() -> None:
            step.advance(size)
            buffers.advance()
            step.run_decode_in_place(size, buffers.attention)

        constants, limit = buffers.prepare_capture(size), step.num_speculative_tokens - 1
        return Capturable.loop(body, constants, step.sampler.continue_flag, limit)

    def run(self, size: int, num_steps: int) -> None:
        """The device knows the number of steps."""
        self._buffers.build_round(size)
        self._replay(size)
