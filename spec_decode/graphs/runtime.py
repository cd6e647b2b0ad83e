"""One capture API with two runtimes: CUDA graphs, and the CPU emulator with a CUDA graph's semantics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Graph(Protocol):
    """A recorded run of device operations over fixed addresses."""

    num_nodes: int | None
    """Operations a replay runs, where the runtime can tell."""

    def replay(self) -> None:
        """Run the recorded operations again, on what their inputs hold now. Nothing of the host is read."""
        ...


class GraphRuntime(Protocol):
    """Captures functions of device work. A capture does not execute: device state is as before it."""

    def capture(self, fn: Callable[[], Any]) -> Graph:
        """Record fn's device operations. Raises CaptureError if fn reads the device or its shapes depend on data."""
        ...

    def memory_used(self) -> int:
        """Bytes of device memory in use, to report what graphs cost."""
        ...


class CaptureError(RuntimeError):
    """Something in a captured function that no graph can hold; the message names the operation."""
