"""What a soak may not eat: the device's memory, and the host's."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from spec_decode.tools.soak.result import Memory

RESIDENT_GROWTH = 32 << 20
"""Bytes that the resident set may grow by, since allocators fragment: in 20,000 rounds, 1.6 KiB a round."""
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes in use; None is what the device or the system does not tell."""

    allocated: int | None
    resident: int | None


def forget_peaks(device: torch.device) -> None:
    """Begin anew: what an earlier backend left in the allocator's cache is not this one's."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def read(device: torch.device) -> Reading:
    """What is in use once all work has ended and nothing that is lost is kept; waits for the device."""
    gc.collect()
    allocated = None
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        allocated = torch.cuda.memory_allocated(device)
    return Reading(allocated, _resident())


def compare(device: torch.device, warm: Reading, end: Reading) -> Memory:
    """The two readings as the report has them."""
    return Memory(
        allocated_warm=warm.allocated,
        allocated_end=end.allocated,
        reserved_most=torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None,
        resident_warm=warm.resident,
        resident_end=end.resident,
        resident_growth_allowed=RESIDENT_GROWTH,
    )


def growth(memory: Memory) -> str | None:
    """What grew, in words; None if nothing did."""
    if memory.allocated_warm != memory.allocated_end:
        return (
            f"{memory.allocated_warm} bytes were allocated on the device after the warm-up, {memory.allocated_end} at "
            "the end; somebody keeps tensors"
        )
    if memory.resident_warm is None or memory.resident_end is None:
        return None
    grown = memory.resident_end - memory.resident_warm
    if grown > memory.resident_growth_allowed:
        return (
            f"the resident set grew by {grown} bytes after the warm-up, at most {memory.resident_growth_allowed} are "
            "allowed; somebody keeps host memory"
        )
    return None


def _resident() -> int | None:
    if not _STATM.exists():
        return None
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
