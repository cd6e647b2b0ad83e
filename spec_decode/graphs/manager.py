"""The graphs of a drafter or a target: what is captured, in which order, at what cost, and which serves a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from rich.progress import track

from builders import BatchError, CaptureConstants
from builders.devices import on_device
from spec_decode.graphs.runtime import CaptureError, Graph, GraphRuntime, SplitOp


def runtime_for(device: torch.device) -> GraphRuntime:
    """Return a runtime for the device, with its own memory pool."""
    # Only the device's own is loaded: no emulator beside CUDA graphs, and no CUDA graphs on a CPU.
    if device.type == "cuda":
        from spec_decode.graphs.cuda import CudaRuntime

        return CudaRuntime(device)
    from spec_decode.graphs.emulator import EmulatedRuntime

    return EmulatedRuntime()


def loop_unsupported_reason(device: torch.device) -> str | None:
    """Return why no loop can be captured on the device, and the remedy; None if one can."""
    if device.type != "cuda":
        return None
    from spec_decode.graphs import cuda_loop

    return cuda_loop.unsupported_reason()


class GraphKey(NamedTuple):
    """What a graph runs and for how many rows. Step 0 and later steps have different shapes, hence different kinds."""

    kind: str
    num_reqs: int


@dataclass(frozen=True, slots=True)
class Capturable:
    """Device work, the host constants that a capture bakes in, and how a runtime captures it; one graph by default."""

    run: Callable[[], Any]
    constants: CaptureConstants
    record: Callable[[GraphRuntime], Graph] | None = None

    @staticmethod
    def loop(
        first: Callable[[], Any],
        body: Callable[[], Any],
        constants: CaptureConstants,
        continue_flag: torch.Tensor,
        limit: int,
    ) -> Capturable:
        """Work that the graph runs first, and work that it repeats, as `GraphRuntime.capture_loop` takes them."""

        def once() -> None:
            first()
            body()

        return Capturable(once, constants, lambda runtime: runtime.capture_loop(first, body, continue_flag, limit))

    @staticmethod
    def pieces(run: Callable[[SplitOp], Any], constants: CaptureConstants) -> Capturable:
        """Work that is captured in pieces, split around the calls that it passes to its argument."""
        return Capturable(lambda: run(_call), constants, lambda runtime: runtime.capture_pieces(run))

    def after(self, first: Capturable) -> Capturable:
        """Merge two units of work, both captured whole, into one graph. A replay checks this one's constants, with the
        shorter of the two max_seq_len."""

        def both() -> None:
            first.run()
            self.run()

        max_seq_len = min(first.constants.max_seq_len, self.constants.max_seq_len)
        return Capturable(both, replace(self.constants, max_seq_len=max_seq_len))

    def capture(self, runtime: GraphRuntime) -> Graph:
        """Capture the graph. Raises CaptureError for work that no graph can hold."""
        return self.record(runtime) if self.record else runtime.capture(self.run)


def _call(fn: Callable[..., torch.Tensor], /, *inputs: torch.Tensor) -> torch.Tensor:
    return fn(*inputs)


class CaptureReport(NamedTuple):
    """A graph's cost. estimated_bytes: the size expected before capture; None for the largest, which sets the scale."""

    key: GraphKey
    seconds: float
    bytes: int
    num_nodes: int | None
    estimated_bytes: int | None = None


Factory = Callable[[int], Capturable]
"""Prepares the dummy metadata for a padded size and returns the work over it."""


def default_capture_sizes(max_reqs: int) -> list[int]:
    """Return the powers of two up to max_reqs, and max_reqs itself."""
    return sorted({*(1 << power for power in range(max_reqs.bit_length())), max_reqs})


class GraphManager:
    """Graphs in one memory pool, captured largest first and dispatched by padded batch size.

    Memory: the graphs of the largest size n are measured during capture, and those of a size s are expected to take s/n
    of that. They take less, because they reuse the pool's free memory.
    """

    def __init__(self, device: torch.device, sizes: Sequence[int], *, memory_limit: int | None = None) -> None:
        """memory_limit: total bytes for all graphs; None means no limit. A size that is not expected to fit is left
        out, and its batches are padded to the next larger one. If the largest size exceeds the limit, the capture
        raises, because nothing else could serve a full batch.

        Raises BatchError for an empty list of sizes or a size below 1.
        """
        if not sizes or min(sizes) < 1:
            raise BatchError(
                f"capture sizes must be at least one number of requests, each 1 or more, got {list(sizes)}. "
                "Pass, for example, [1, 2, 4, 8]."
            )
        self.device = device
        self.sizes = tuple(sorted(set(sizes)))
        self.memory_limit = memory_limit
        self.complete = False
        """Whether every graph requested from capture() exists, except for the sizes left out."""
        self.left_out: dict[int, str] = {}
        """Size -> why it was not captured."""
        self.reports: list[CaptureReport] = []
        self._runtime = runtime_for(device)
        self._graphs: dict[GraphKey, tuple[Graph, CaptureConstants]] = {}

    @property
    def bytes_used(self) -> int:
        """Measured bytes of the graphs captured so far."""
        return sum(report.bytes for report in self.reports)

    def padded(self, num_reqs: int, *, eager: bool = False) -> int:
        """Return the rows of a batch: the smallest captured size that serves num_reqs requests.

        An eager batch has the same shapes, so its tokens are the same, and can be larger than every size. Otherwise a
        batch above the largest size raises BatchError.
        """
        for size in self.sizes:
            if num_reqs <= size and size not in self.left_out:
                return size
        if eager:
            return num_reqs
        raise BatchError(
            f"the largest captured batch is {self.sizes[-1]} requests, got {num_reqs}; running it eagerly would "
            "change the strategy. Capture that size, or split the batch."
        )

    def capture(self, factories: Mapping[str, Factory], *, progress: bool = False) -> None:
        """Capture each kind at each size, largest first so that smaller ones reuse its memory.

        Continues an interrupted capture: existing graphs are kept. A factory is called twice per size, for warm-up and
        for capture, so that none of the warm-up's metadata is baked in. Raises CaptureError, with every graph released,
        if the largest size exceeds the memory limit.
        """
        self.left_out.clear()
        sizes = list(reversed(self.sizes))
        for size in track(sizes, description="capturing graphs", disable=not progress, transient=True):
            missing = [kind for kind in factories if GraphKey(kind, size) not in self._graphs]
            if missing and self._fits(size, missing):
                for kind in missing:
                    self._capture_one(GraphKey(kind, size), factories[kind])
            self._check_limit(size)
        self.complete = True

    def estimate(self, kind: str, num_reqs: int) -> int | None:
        """Return the bytes that a graph is expected to take; None before the largest of its kind is captured."""
        largest = self.sizes[-1]
        measured = [r.bytes for r in self.reports if r.key == GraphKey(kind, largest)]
        return measured[0] * num_reqs // largest if measured else None

    def replay(self, key: GraphKey, needed: CaptureConstants) -> None:
        """Replay a graph. Raises BatchError, with nothing run, if it does not exist or the batch exceeds it."""
        if key not in self._graphs:
            raise BatchError(
                f"there is no captured graph of kind {key.kind} for {key.num_reqs} requests "
                f"({self.left_out.get(key.num_reqs, 'it was never captured, or was released')}). "
                "Pad the batch to a size that padded() returns after capture()."
            )
        graph, constants = self._graphs[key]
        if problems := constants.exceeded_by(needed):
            raise BatchError(
                f"a replay exceeds its capture: {'; '.join(problems)} ({key.kind} graph of {key.num_reqs} requests). "
                "Its kernels would drop keys or rows. Capture with larger bounds."
            )
        graph.replay()

    def release(self) -> None:
        """Drop every graph and free the memory; capture() makes new ones at other addresses."""
        self._graphs.clear()
        self.reports.clear()
        self.left_out.clear()
        self.complete = False
        self._runtime.release()

    def _capture_one(self, key: GraphKey, factory: Factory) -> None:
        with torch.no_grad(), on_device(self.device):
            factory(key.num_reqs).run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        work, expected = factory(key.num_reqs), self.estimate(key.kind, key.num_reqs)
        before, start = self._runtime.memory_used(), time.perf_counter()
        graph = work.capture(self._runtime)
        seconds, used = time.perf_counter() - start, self._runtime.memory_used() - before
        self._graphs[key] = (graph, work.constants)
        self.reports.append(CaptureReport(key, seconds, used, graph.num_nodes, expected))

    def _fits(self, size: int, kinds: Sequence[str]) -> bool:
        """Whether a size is expected to fit under the limit; if not, records why. The largest has no estimate yet."""
        expected = sum(self.estimate(kind, size) or 0 for kind in kinds)
        if self.memory_limit is None or size == self.sizes[-1] or self.bytes_used + expected <= self.memory_limit:
            return True
        self.left_out[size] = (
            f"size {size} was left out: its graphs should take {expected} bytes, and {self.bytes_used} of the "
            f"{self.memory_limit} allowed are used"
        )
        return False

    def _check_limit(self, size: int) -> None:
        taken = sum(report.bytes for report in self.reports if report.key.num_reqs == self.sizes[-1])
        if size == self.sizes[-1] and self.memory_limit is not None and taken > self.memory_limit:
            self.release()
            raise CaptureError(
                f"the graphs of the largest size, {size} requests, took {taken} bytes, but the memory limit is "
                f"{self.memory_limit}; a full batch could not be served, so every graph was released. "
                "Raise the limit, capture smaller sizes only, or turn graphs off."
            )
