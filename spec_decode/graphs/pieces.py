"""A run that is captured in pieces, with eager calls between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from spec_decode.graphs.runtime import Graph


class SplitOpCall:
    """An eager call between two pieces; its inputs and its result keep the addresses that they had at capture."""

    num_nodes: int | None = 1

    def __init__(self, fn: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        self._fn, self._inputs = fn, tuple(inputs)
        self.result = fn(*inputs).clone()

    def replay(self) -> None:
        self.result.copy_(self._fn(*self._inputs))


class PiecewiseGraph:
    """Graphs and the calls between them, in order."""

    def __init__(self, parts: Sequence[Graph]) -> None:
        self._parts = tuple(parts)
        counts = [part.num_nodes for part in parts]
        self.num_nodes = None if None in counts else sum(count or 0 for count in counts)

    def replay(self) -> None:
        with torch.no_grad():
            for part in self._parts:
                part.replay()
