"""One capture API with two runtimes: CUDA graphs, and the CPU emulator with a CUDA graph's semantics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

ONE_CAPTURE = threading.RLock()
"""Held while something is captured: what a capture changes belongs to the process, and threads would undo each other's.
"""


class Graph(Protocol):
    """A recorded run of device operations over fixed addresses."""

    num_nodes: int | None
    """Operations that a replay runs, or one iteration of a loop, where the runtime can tell."""

    def replay(self) -> None:
        """Run the recorded operations again on what their inputs hold now. Nothing on the host is read."""


class SplitOp(Protocol):
    """Splits a capture in two around a call that no graph can hold.

    Between the pieces, each replay runs fn(*inputs) eagerly over what the captured tensors hold by then, and copies the
    result to the tensor that is returned here. The capture runs fn too, to learn the result's shape, over inputs whose
    content means nothing: fn must be harmless on them, and its result's shape must not depend on them.
    """

    def __call__(self, fn: Callable[..., torch.Tensor], /, *inputs: torch.Tensor) -> torch.Tensor: ...


class GraphRuntime(Protocol):
    """Captures functions of device work. A capture does not execute: device state is as before it.

    Each raises CaptureError if the function reads the device or its shapes depend on data.
    """

    def capture(self, fn: Callable[[], Any]) -> Graph:
        """Record fn's device operations."""

    def capture_loop(
        self, first: Callable[[], Any], body: Callable[[], Any], continue_flag: torch.Tensor, limit: int
    ) -> Graph:
        """A graph that runs first's operations, and then body's as long as continue_flag is not zero.

        continue_flag: int32 [1], written by both. Within `limit` iterations of body it must become 0; the emulator
        raises CaptureError where it does not.
        """

    def capture_pieces(self, run: Callable[[SplitOp], Any]) -> Graph:
        """Record run in pieces, split where it hands a call to its argument."""

    def memory_used(self) -> int:
        """Bytes of device memory in use, to report what graphs cost."""

    def release(self) -> None:
        """Give back the memory of graphs that are gone; later captures start a new pool."""


class CaptureError(RuntimeError):
    """Something in a captured function that no graph can hold; the message names the operation."""


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
