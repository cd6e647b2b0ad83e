"""One capture API with two runtimes: CUDA graphs, and the CPU emulator with the same semantics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

ONE_CAPTURE = threading.RLock()
"""Held during a capture: it changes process-wide state, which concurrent threads would undo for each other."""


class Graph(Protocol):
    """A recorded run of device operations over fixed addresses."""

    num_nodes: int | None
    """Operations per replay, or per iteration of a loop, if the runtime can tell."""

    def replay(self) -> None:
        """Run the recorded operations again on the current content of their inputs, with no host read."""


class SplitOp(Protocol):
    """Splits a capture in two around a call that no graph can hold.

    Between the pieces, each replay runs fn(*inputs) eagerly on the current content of the captured tensors, and copies
    the result to the tensor returned here. The capture runs fn too, to learn the result's shape, on meaningless inputs:
    fn must be harmless on them, and its result's shape must not depend on their content. A replay's result can have
    fewer rows; the other rows are undefined. fn must not keep its inputs' memory: later pieces can use it.
    """

    def __call__(self, fn: Callable[..., torch.Tensor], /, *inputs: torch.Tensor) -> torch.Tensor: ...


class GraphRuntime(Protocol):
    """Captures functions of device work. A capture does not execute: device state is the same afterwards.

    Each method raises CaptureError if the function reads the device or its shapes depend on data.
    """

    def capture(self, fn: Callable[[], Any]) -> Graph:
        """Record fn's device operations."""

    def capture_loop(
        self, first: Callable[[], Any], body: Callable[[], Any], continue_flag: torch.Tensor, limit: int
    ) -> Graph:
        """Record a graph that runs first's operations, then body's for as long as continue_flag is nonzero.

        continue_flag: int32 [1], written by both. It must become 0 within `limit` iterations of body; otherwise the
        emulator raises CaptureError.
        """

    def capture_pieces(self, run: Callable[[SplitOp], Any]) -> Graph:
        """Record run in pieces, split wherever it passes a call to its argument."""

    def memory_used(self) -> int:
        """Return the bytes of device memory in use, to report what graphs cost."""

    def release(self) -> None:
        """Free the memory of dropped graphs; later captures start a new pool."""


class CaptureError(RuntimeError):
    """Work in a captured function that no graph can hold; the message names the operation."""


class SplitOpCall:
    """An eager call between two pieces; inputs and result keep their addresses from capture."""

    num_nodes: int | None = 1

    def __init__(self, fn: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        self._fn, self._inputs, self._result = fn, tuple(inputs), result

    def replay(self) -> None:
        result = self._fn(*self._inputs)
        with torch.inference_mode():  # torch writes a result of this mode only here
            self._result[: len(result)].copy_(result)


class PiecewiseGraph:
    """Graphs and the eager calls between them, in order."""

    def __init__(self, parts: Sequence[Graph]) -> None:
        self._parts = tuple(parts)
        counts = [part.num_nodes for part in parts]
        self.num_nodes = None if None in counts else sum(count or 0 for count in counts)

    def replay(self) -> None:
        with torch.no_grad():
            for part in self._parts:
                part.replay()
