"""What the strategies have in common whose one graph holds every later step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace

from spec_decode.drafter.strategies.base import DraftStrategy
from spec_decode.graphs import Capturable, Factory


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

    def _capturable(self, size: int) -> Capturable:
        return self._after(size, lambda: None)

    @abstractmethod
    def _after(self, size: int, before: Callable[[], object]) -> Capturable:
        """Every later step of `size` rows after something else."""

    def run_later_steps(self, size: int, num_steps: int) -> None:
        """The graph, or the device, knows the number of steps."""
        self._buffers.build_round_metadata(size)
        self._replay(size)
