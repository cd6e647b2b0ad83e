"""Memory that a soak may not keep: the device's, and the host's."""

from __future__ import annotations

import torch

from spec_decode.testing.memory import MemoryReading
from spec_decode.tools.soak.result import Memory

RESIDENT_GROWTH = 32 << 20
"""Bytes that the resident set may grow by, since allocators fragment: in 20,000 rounds, 1.6 KiB a round."""


def compare(device: torch.device, warm: MemoryReading, end: MemoryReading) -> Memory:
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
