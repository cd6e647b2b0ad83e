"""Bytes in use on the device and on the host."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path

import torch

_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes in use; None if the device or the system does not report them."""

    allocated: int | None
    resident: int | None


def read(device: torch.device) -> MemoryReading:
    """Read the memory in use after all work has ended and garbage was collected. Syncs with the device."""
    gc.collect()
    allocated = None
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        allocated = torch.cuda.memory_allocated(device)
    resident = int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if _STATM.exists() else None
    return MemoryReading(allocated, resident)
