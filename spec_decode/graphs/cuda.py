"""CUDA graphs."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from spec_decode.graphs.cuda_loop import WhileGraph
from spec_decode.graphs.runtime import ONE_CAPTURE, CaptureError, Graph, PiecewiseGraph, SplitOp, SplitOpCall


class CudaGraph:
    """A captured CUDA graph."""

    num_nodes: int | None = None

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph
        self.replay: Callable[[], None] = graph.replay


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory that does not keep it: every layer's tensors would be kept, where the pool
    needs one layer's."""
    if not tensor.numel():
        return tensor
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = SimpleNamespace(
        __cuda_array_interface__={
            "shape": (elements * tensor.itemsize,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }
    )
    flat = torch.as_tensor(memory, device=tensor.device)
    return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class CudaRuntime:
    """Captures into its own memory pool: sharing a pool with another owner has overwritten live temporaries."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._device = self._stream.device

    def capture(self, fn: Callable[[], Any]) -> CudaGraph:
        return CudaGraph(self._capture(fn))

    def capture_loop(
        self, first: Callable[[], Any], body: Callable[[], Any], continue_flag: torch.Tensor, limit: int
    ) -> WhileGraph:
        return WhileGraph(continue_flag, first, body, partial(self._capture, keep_graph=True))

    def capture_pieces(self, run: Callable[[SplitOp], Any]) -> PiecewiseGraph:
        parts: list[Graph] = []

        def begin() -> None:
            graph = torch.cuda.CUDAGraph()
            parts.append(CudaGraph(graph))
            piece.enter_context(self._recording(graph))

        def split_op(fn: Callable[..., torch.Tensor], /, *inputs: torch.Tensor) -> torch.Tensor:
            piece.close()
            shaped, borrowed = fn(*inputs), [_borrowed(each) for each in inputs]
            at = len(parts)
            begin()
            # From the graphs' pool, which takes it back when the work that reads it is captured.
            result = torch.empty_like(shaped)
            parts.insert(at, SplitOpCall(fn, borrowed, _borrowed(result)))
            return result

        with self._capturing(), ExitStack() as piece:
            begin()
            run(split_op)
        graph = PiecewiseGraph(parts)
        # A call can hold split_op, whose list would hold the call: a cycle that keeps graphs and caches alive.
        parts.clear()
        return graph

    def memory_used(self) -> int:
        # A capture empties the allocator's caches of freed memory; emptied first, they hide nothing that it takes.
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def release(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def _capture(self, fn: Callable[[], object], **options: bool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(**options)
        with self._capturing(), self._recording(graph):
            fn()
        return graph

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """Prepare for the captures of a graph or its pieces, with garbage collection off: freeing a graph object during
        a capture invalidates it (observed).

        Raises CaptureError for anything but device work, and torch's own error if memory runs out.
        """
        try:
            with ONE_CAPTURE, _no_collection(), torch.cuda.device(self._device), torch.no_grad():
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                yield
        except (CaptureError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise CaptureError(
                f"a captured function can only enqueue device work: {error}. No graph was made. Move host reads and "
                "allocations of host data out of it."
            ) from error

    @contextmanager
    def _recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """What torch.cuda.graph does, without emptying the allocator's caches before each of a graph's many pieces."""
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            # An advance with nothing to refresh can capture nothing.
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # which says only that something failed before
                    graph.capture_end()
                raise
            graph.capture_end()


@contextmanager
def _no_collection() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
