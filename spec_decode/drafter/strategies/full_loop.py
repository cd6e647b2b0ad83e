"""All K - 1 later steps, unrolled into one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from builders import AdvanceLevel
from spec_decode.drafter.strategies.base import LoopStrategy, advance_unsupported_reason
from spec_decode.graphs import Capturable
from spec_decode.paged.attention import PagedAttention
from spec_decode.paged.metadata_plan import GraphMode, GroupFacts, MetadataUpdate


class FullLoop(LoopStrategy):
    """Each group's metadata advances inside the graph, or is planned for every step before the replay.

    All K - 1 steps always run; if fewer tokens were requested, no request still drafts in the last ones.
    """

    chosen_because = "every group's metadata advances in the graph, or is planned ahead"
    fallback_update = MetadataUpdate.PREPLANNED
    separate_graph_reason = None

    @classmethod
    def unsupported_reason(
        cls, groups: Sequence[GroupFacts], graph_mode: GraphMode, loop_unsupported_reason: str | None
    ) -> str | None:
        return advance_unsupported_reason(groups, graph_mode, AdvanceLevel.PREPLANNED)

    def _after(self, size: int, before: Callable[[], object]) -> Capturable:
        step, buffers = self._step, self._buffers

        def run() -> None:
            before()
            hidden = step.hidden[:size]
            for index in range(1, step.num_speculative_tokens):
                step.advance_state(size)
                buffers.advance_metadata()
                hidden = step.run_later_step(size, hidden, PagedAttention(step.groups, buffers.metadata_of_step(index)))

        return Capturable(run, buffers.prepare_capture(size))
