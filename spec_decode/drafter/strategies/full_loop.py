"""All K - 1 later steps in one graph."""

from __future__ import annotations

from collections.abc import Sequence

from builders import AdvanceLevel
from spec_decode.drafter.attention import PagedAttention
from spec_decode.drafter.metadata_plan import GraphMode, GroupFacts, MetadataUpdate
from spec_decode.drafter.strategies.base import DraftStrategy, advance_unsupported_reason
from spec_decode.graphs import Capturable


class FullLoop(DraftStrategy):
    """A group's metadata advances inside the graph, or was planned for each step before the replay."""

    chosen_because = "every group's metadata advances in the graph, or is planned ahead"
    graph_kind = "loop"
    otherwise = MetadataUpdate.PREPLANNED

    @classmethod
    def unsupported_reason(
        cls, groups: Sequence[GroupFacts], graph_mode: GraphMode, loop_unsupported_reason: str | None
    ) -> str | None:
        return advance_unsupported_reason(groups, graph_mode, AdvanceLevel.PREPLANNED)

    def _capturable(self, size: int) -> Capturable:
        step, buffers = self._step, self._buffers

        def run() -> None:
            hidden = step.hidden[:size]
            for index in range(1, step.num_speculative_tokens):
                step.advance(size)
                buffers.advance()
                hidden = step.run_decode(size, hidden, PagedAttention(step.groups, buffers.metadata_of_step(index)))

        return Capturable(run, buffers.prepare_capture(size))

    def run(self, size: int, num_steps: int) -> None:
        """All K - 1 steps run; the last ones find no request that drafts on where fewer were asked for."""
        self._buffers.build_round(size)
        self._replay(size)
