"""Captured steps followed by a loop in a conditional WHILE node of the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from builders import AdvanceLevel
from spec_decode.drafter.strategies.base import LoopStrategy, advance_unsupported_reason
from spec_decode.graphs import Capturable
from spec_decode.paged.metadata_plan import GraphMode, GroupFacts


class DeviceLoop(LoopStrategy):
    """The device decides after every loop_steps steps whether to run more.

    One graph serves every number of draft tokens, and stops when no request drafts further. The step must contain no
    collective: the event nodes that NCCL captures are illegal in the body of a conditional node.
    """

    needs_later_steps = True
    drawback = "runs only on request; an iteration costs the device more than an unrolled step"
    automatic = False
    separate_graph_reason = "its graph ends with the loop"

    @classmethod
    def unsupported_reason(
        cls, groups: Sequence[GroupFacts], graph_mode: GraphMode, loop_unsupported_reason: str | None
    ) -> str | None:
        return advance_unsupported_reason(groups, graph_mode, AdvanceLevel.IN_GRAPH) or loop_unsupported_reason

    def _after(self, size: int, before: Callable[[], object]) -> Capturable:
        step, buffers = self._step, self._buffers
        num_steps, repeated = step.num_speculative_tokens - 1, self._loop_steps
        # At least one step always runs: it precedes the loop, with the steps that do not fill an iteration.
        limit = (num_steps - 1) // repeated

        def run(steps: int) -> None:
            for _ in range(steps):
                step.advance_state(size)
                buffers.advance_metadata()
                step.run_later_step_in_place(size, buffers.attention)

        def begin() -> None:
            before()
            run(num_steps - limit * repeated)

        constants = buffers.prepare_capture(size)
        if not limit:
            return Capturable(begin, constants)
        return Capturable.loop(begin, partial(run, repeated), constants, step.sampler.continue_flag, limit)
