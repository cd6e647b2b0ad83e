"""The memory that a soak may not keep: the device's, and the host's."""

from __future__ import annotations

import msgspec
import torch

from spec_decode.testing.memory import MemoryReading

RESIDENT_GROWTH = 32 << 20
"""Bytes that the resident set may grow by, since allocators fragment: in 20,000 rounds, 1.6 KiB a round."""


class Memory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes after the warm-up and at the end. On a CUDA device allocated may not change; resident may grow a little.

    allocated, reserved: torch's allocator, null on the CPU; reserved_most is the most it ever held. resident: this
    process on the host, null where the system does not say.
    """

    allocated_warm: int | None
    allocated_end: int | None
    reserved_most: int | None
    resident_warm: int | None
    resident_end: int | None
    resident_growth_allowed: int

    @classmethod
    def between(cls, device: torch.device, warm: MemoryReading, end: MemoryReading) -> Memory:
        """The two readings, after the warm-up and at the end."""
        return cls(
            allocated_warm=warm.allocated,
            allocated_end=end.allocated,
            reserved_most=torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None,
            resident_warm=warm.resident,
            resident_end=end.resident,
            resident_growth_allowed=RESIDENT_GROWTH,
        )

    def growth(self) -> str | None:
        """What grew more than it may; None if nothing did."""
        if self.allocated_warm != self.allocated_end:
            return (
                f"{self.allocated_warm} bytes were allocated on the device after the warm-up, {self.allocated_end} at "
                "the end; somebody keeps tensors"
            )
        if self.resident_warm is None or self.resident_end is None:
            return None
        grown = self.resident_end - self.resident_warm
        if grown > self.resident_growth_allowed:
            return (
                f"the resident set grew by {grown} bytes after the warm-up, at most {self.resident_growth_allowed} are "
                "allowed; somebody keeps host memory"
            )
        return None
