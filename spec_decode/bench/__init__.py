"""Timings as rows of JSON. They inform and never gate: no test is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from builders import BatchError
from spec_decode.bench.drafter_cases import DRAFTERS, drafter_rows
from spec_decode.bench.kernel_cases import advance_rows, decode_rows
from spec_decode.bench.measure import copy_bandwidth
from spec_decode.environment import environment

SCHEMA = "attn-bench/1"

CASES = {
    "advance": "GPU time of the fused advance of all KV groups",
    "paged-decode": "triton_paged decode against copy bandwidth and, where installed, FlashAttention-3",
    **{name: case.description for name, case in DRAFTERS.items()},
}
CPU_CASES = ("drafter-tiny",)
"""Cases that a machine without a GPU can run; their gpu_us is null."""


def run(
    *,
    device: torch.device,
    cases: Sequence[str] | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
    command: str = "",
) -> list[dict[str, Any]]:
    """Time the cases, or all that the device can run; one dict a row, of the schema attn-bench/1.

    Raises BatchError for a case that needs a CUDA device on a machine without one.
    """
    on_cuda = device.type == "cuda"
    wanted = list(cases or (CASES if on_cuda else CPU_CASES))
    if not on_cuda and (stuck := [case for case in wanted if case not in CPU_CASES]):
        raise BatchError(
            f"the cases {', '.join(stuck)} time a CUDA device and this run is on {device.type}; nothing was timed. Run "
            f"{', '.join(CPU_CASES)}, or use a machine with a GPU."
        )
    bandwidth = copy_bandwidth() if on_cuda else None
    env = msgspec.to_builtins(environment(device))
    env["copy_bytes_per_us"] = bandwidth and round(bandwidth)
    found = []
    for case in wanted:
        for row in _rows(case, device, bandwidth):
            found.append({"schema": SCHEMA, **_complete(row), "env": env, "command": command})
            if on_row:
                on_row(found[-1])
    return found


def _rows(case: str, device: torch.device, bandwidth: float | None) -> Iterator[dict[str, Any]]:
    if case == "advance":
        return advance_rows(device, bandwidth)
    if case == "paged-decode":
        return decode_rows(device, bandwidth)
    return drafter_rows(case, device, bandwidth)


def _complete(row: dict[str, Any]) -> dict[str, Any]:
    """Every row has every column; what a case does not measure is null."""
    columns = (
        "case",
        "backend",
        "strategy",
        "num_reqs",
        "num_speculative_tokens",
        "context",
        "wall_us",
        "host_us",
        "gpu_us",
        "kernels_per_step",
        "floor_us",
    )
    return {**dict.fromkeys(columns), **row}
