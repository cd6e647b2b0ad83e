"""Owns a drafter's graphs: what is captured, in which order, at what cost, and which one serves a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import track

from builders import BatchError, CaptureConstants
from spec_decode.graphs.runtime import Graph
from spec_decode.graphs.runtimes import runtime_for


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a graph runs and for how many rows. Step 0 and later steps are different shapes, hence different kinds."""

    kind: str
    num_reqs: int


@dataclass(frozen=True, slots=True)
class Capturable:
    """Device work to capture, and the host constants it bakes in."""

    run: Callable[[], Any]
    constants: CaptureConstants


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What one graph cost."""

    key: GraphKey
    seconds: float
    bytes: int
    num_nodes: int | None


Factory = Callable[[int], Capturable]
"""Prepares the dummy metadata for a padded size and returns the work over it."""


class GraphManager:
    """Graphs in a pool of their own, captured largest first, dispatched by padded batch size."""

    def __init__(self, device: torch.device, sizes: Sequence[int]) -> None:
        if not sizes or min(sizes) < 1:
            raise BatchError(
                f"capture sizes must be at least one number of requests, each 1 or more, got {list(sizes)}; nothing "
                "was captured. Pass for example [1, 2, 4, 8]."
            )
        self.device = device
        self.sizes = tuple(sorted(set(sizes)))
        self._runtime = runtime_for(device)
        self._graphs: dict[GraphKey, tuple[Graph, CaptureConstants]] = {}
        self.reports: list[CaptureReport] = []

    def padded(self, num_reqs: int) -> int:
        """The captured size that serves num_reqs requests; BatchError above the largest."""
        for size in self.sizes:
            if num_reqs <= size:
                return size
        raise BatchError(
            f"graphs were asked for and the largest captured batch is {self.sizes[-1]} requests, got {num_reqs}; "
            "running it without a graph would be another strategy, so nothing was run. Capture that size, or split "
            "the batch."
        )

    def capture(self, factories: Mapping[str, Factory], *, progress: bool = False) -> None:
        """Capture each kind at each size, the largest first so that smaller ones reuse its memory.

        A factory is called twice a size, for the warm-up and for the capture, so that nothing of the warm-up's
        metadata is baked in.
        """
        todo = [GraphKey(kind, size) for size in reversed(self.sizes) for kind in factories]
        for key in track(todo, description="capturing graphs", disable=not progress, transient=True):
            factory = factories[key.kind]
            with torch.no_grad():
                factory(key.num_reqs).run()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            work = factory(key.num_reqs)
            before, start = self._runtime.memory_used(), time.perf_counter()
            graph = self._runtime.capture(work.run)
            seconds, used = time.perf_counter() - start, self._runtime.memory_used() - before
            self._graphs[key] = (graph, work.constants)
            self.reports.append(CaptureReport(key, seconds, used, graph.num_nodes))

    def replay(self, key: GraphKey, needed: CaptureConstants) -> None:
        """Replay a graph; BatchError, with nothing run, when the batch needs more than it was captured for."""
        graph, constants = self._graphs[key]
        if not constants.covers(needed):
            problems = constants.exceeded_by(needed)
            raise BatchError(
                f"a replay may not go past its capture: {'; '.join(problems)} ({key.kind} graph of "
                f"{key.num_reqs} requests). Its kernels would drop keys or rows, so nothing was run. Capture with "
                "larger bounds."
            )
        graph.replay()

    def release(self) -> None:
        """Drop every graph; capture() makes them anew."""
        self._graphs.clear()
        self.reports.clear()
