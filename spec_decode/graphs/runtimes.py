"""Which runtime serves a device."""

from __future__ import annotations

import torch

from spec_decode.graphs import cuda_loop
from spec_decode.graphs.cuda import CudaRuntime
from spec_decode.graphs.emulator import EmulatedRuntime
from spec_decode.graphs.runtime import GraphRuntime


def runtime_for(device: torch.device) -> GraphRuntime:
    """A runtime for that device, with a memory pool of its own."""
    return CudaRuntime(device) if device.type == "cuda" else EmulatedRuntime()


def loop_unsupported_reason(device: torch.device) -> str | None:
    """Why no loop can be captured on that device, and what would change it; None where one can."""
    return cuda_loop.unsupported_reason() if device.type == "cuda" else None
