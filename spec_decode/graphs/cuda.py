"""CUDA graphs."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from spec_decode.graphs.runtime import CaptureError


class CudaGraph:
    """A captured CUDA graph."""

    num_nodes: int | None = None

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph
        self.replay: Callable[[], None] = graph.replay


class CudaRuntime:
    """Captures into one memory pool of its own: sharing a pool with another owner has clobbered live temporaries."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, fn: Callable[[], Any]) -> CudaGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                torch.no_grad(),
                warnings.catch_warnings(),
                _no_collection(),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                # A builder whose advance has nothing to refresh captures nothing, and may.
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                fn()
        except RuntimeError as error:
            raise CaptureError(
                f"a captured function may only enqueue device work, this one did something else: {error}. No graph was "
                "made. Move host reads and allocations of host data out of it."
            ) from error
        return CudaGraph(graph)

    def memory_used(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


@contextmanager
def _no_collection() -> Iterator[None]:
    """A graph object freed by the garbage collector while a stream captures invalidates that capture (seen)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
