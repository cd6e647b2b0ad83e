"""Timing on a device: quantiles of host, wall and GPU time, launches, and the rates that set the floor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from spec_decode.graphs import runtime_for

_WARMUP = 5
_REPEATS = 40
_CYCLES_A_MICROSECOND = 2000
"""Upper bound on a GPU's clock."""
_MATMUL_SIZE = 8192
_NAME = 160
"""Characters of a kernel's name: more of a template's arguments tell nothing."""
_QUANTILES = {"p20": 0.2, "p50": 0.5, "p80": 0.8}

Quantiles = dict[str, float]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Microseconds of one call. host_us: from call to return. wall_us: until the device, idle before, is done. gpu_us:
    on a device kept busy until the whole call is enqueued, so launch time does not count."""

    host_us: Quantiles
    wall_us: Quantiles
    gpu_us: Quantiles | None


def quantiles(samples: list[float]) -> Quantiles:
    """Return p20, p50 and p80 of samples."""
    return {name: round(float(np.quantile(samples, q)), 3) for name, q in _QUANTILES.items()}


def time_call(
    call: Callable[[], object], device: torch.device, *, prepare: Callable[[], object] = lambda: None
) -> CallTimes:
    """Time a call, after an untimed `prepare` each time."""
    for _ in range(_WARMUP):
        prepare()
        call()
    host, wall = [], []
    on_cuda = device.type == "cuda"
    for _ in range(_REPEATS):
        prepare()
        if on_cuda:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        host.append((time.perf_counter() - start) * 1e6)
        if on_cuda:
            torch.cuda.synchronize(device)
        wall.append((time.perf_counter() - start) * 1e6)
    host_us = quantiles(host)
    return CallTimes(host_us, quantiles(wall), _gpu_us(call, prepare, host_us["p80"]) if on_cuda else None)


def _gpu_us(call: Callable[[], object], prepare: Callable[[], object], host_us: float) -> Quantiles:
    samples = []
    for _ in range(_REPEATS // 2):
        prepare()
        torch.cuda._sleep(int(2 * host_us * _CYCLES_A_MICROSECOND))
        samples.append(_elapsed_us(call))
    return quantiles(samples)


def _elapsed_us(call: Callable[[], object]) -> float:
    """Return GPU microseconds from a call's first to its last work."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def time_kernels(launch: Callable[[], object], *, calls: int = 50) -> Quantiles:
    """Return GPU microseconds of one launch, from graph replays of many, so that launch gaps do not count."""
    launch()
    graph = runtime_for(torch.device("cuda")).capture(lambda: [launch() for _ in range(calls)])
    return quantiles([_elapsed_us(graph.replay) / calls for _ in range(_REPEATS)])


def time_in_turn(call: Callable[[T], object], inputs: Sequence[T]) -> Quantiles:
    """Return GPU microseconds of one call, averaged over the inputs, which are used in turn."""
    calls = max(2, min(50, 256 // len(inputs)))
    gpu_us = time_kernels(lambda: [call(each) for each in inputs], calls=calls)
    return {name: round(value / len(inputs), 3) for name, value in gpu_us.items()}


def kernels_in(call: Callable[[], object]) -> int:
    """Count the CUDA kernels, copies and fills that one call runs."""
    return len(_device_work(call))


def largest_kernels(call: Callable[[], object], most: int) -> dict[str, object]:
    """Return where the time of one call goes on the device: `gpu_us` of all kernels, copies and fills, which can
    overlap; `busy_us`, in which any of them runs; and `span_us`, from the first one's start to the last one's end. The
    `most` largest by name are in `kernels`, with `us` and `launches`, and the longest waits in `gaps`, with `us` and
    the names before and after."""
    return _largest(_device_work(call), most)


class _Work(NamedTuple):
    """A kernel, copy or fill on the device, in microseconds, by the start of its name."""

    start: float
    end: float
    name: str


def _largest(work: Sequence[_Work], most: int) -> dict[str, object]:
    times: dict[str, tuple[float, int]] = {}
    gaps: list[tuple[float, str, str]] = []
    busy, until, last = 0.0, 0.0, ""
    for start, end, name in sorted(work):
        us, launches = times.get(name, (0.0, 0))
        times[name] = us + end - start, launches + 1
        if last and start > until:
            gaps.append((start - until, last, name))
        busy += max(0.0, end - max(start, until))
        if end > until:
            until, last = end, name
    largest = sorted(times, key=lambda name: -times[name][0])[:most]
    return {
        "gpu_us": round(sum(us for us, _ in times.values()), 1),
        "busy_us": round(busy, 1),
        "span_us": round(until - min((each.start for each in work), default=0.0), 1),
        "kernels": [{"kernel": name, "us": round(times[name][0], 1), "launches": times[name][1]} for name in largest],
        "gaps": [
            {"us": round(us, 1), "before": before, "after": after} for us, before, after in sorted(gaps)[::-1][:most]
        ],
    }


def _device_work(call: Callable[[], object]) -> list[_Work]:
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [
        _Work(event.time_range.start, event.time_range.end, event.name[:_NAME])
        for event in profile.events()
        if event.device_type.name == "CUDA"
    ]


def kernel_interval() -> float:
    """Return microseconds from one nearly empty kernel of a graph to the next. It is a property of the process: on one
    H200 it was 0.84 or 1.02."""
    counter = torch.zeros(1, device="cuda")
    return time_kernels(lambda: counter.add_(1), calls=1000)["p50"]


def copy_bandwidth() -> float:
    """Return the bytes per microsecond that an elementwise copy of 2 GiB reads and writes together."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    median = time_kernels(lambda: torch.add(source, 0, out=target), calls=4)["p50"]
    return 2 * source.numel() * source.element_size() / median


def matmul_rate() -> float:
    """Return floating-point operations per microsecond of torch's product of two large bf16 matrices: the best of many,
    because a floor must not exceed what is achievable."""
    left, right = torch.randn(2, _MATMUL_SIZE, _MATMUL_SIZE, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(left)
    best = min(_elapsed_us(lambda: torch.mm(left, right, out=out)) for _ in range(_REPEATS))
    return 2 * _MATMUL_SIZE**3 / best


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """How fast a device copies and multiplies; see `copy_bandwidth` and `matmul_rate`."""

    copy_bytes_per_us: float
    matmul_flops_per_us: float

    @classmethod
    def measured(cls) -> DeviceRates:
        """Measure the current device, a GPU."""
        return cls(copy_bandwidth(), matmul_rate())

    def least_us(self, num_bytes: float, flops: float = 0.0) -> float:
        """Return the time to move that many bytes, or to do the arithmetic if that takes longer."""
        return max(num_bytes / self.copy_bytes_per_us, flops / self.matmul_flops_per_us)
