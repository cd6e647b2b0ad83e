"""What the strategies have in common whose one graph holds every later step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace

from spec_decode.drafter.strategies.base import DraftStrategy
from spec_decode.graphs import Capturable


class LoopStrategy(DraftStrategy):
    """All later steps in one graph, with step 0 before them where the host builds nothing of the round."""

    graph_kind = "loop"

    @property
    def joins_step_0(self) -> bool:
        """Whether the graph can hold step 0 too."""
        return not self._step.extend.built_groups and not self._buffers.built_groups

    def joined(self, size: int, step_0: Capturable) -> Capturable:
        """Step 0 of `size` rows and every later step."""
        later = self._after(size, step_0.run)
        # As wide as step 0, and as long as the shorter bound of the two.
        max_seq_len = min(step_0.constants.max_seq_len, later.constants.max_seq_len)
        return replace(later, constants=replace(step_0.constants, max_seq_len=max_seq_len))

    def _capturable(self, size: int) -> Capturable:
        return self._after(size, lambda: None)

    @abstractmethod
    def _after(self, size: int, before: Callable[[], object]) -> Capturable:
        """Every later step of `size` rows after something else."""

    def run(self, size: int, num_steps: int) -> None:
        """The graph, or the device, knows the number of steps."""
        self._buffers.build_round(size)
        self._replay(size)
