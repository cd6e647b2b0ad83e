"""Which runtime serves a device."""

from __future__ import annotations

import torch

from spec_decode.graphs.cuda import CudaRuntime
from spec_decode.graphs.emulator import EmulatedRuntime
from spec_decode.graphs.runtime import GraphRuntime


def runtime_for(device: torch.device) -> GraphRuntime:
    """A runtime with a memory pool of its own on that device."""
    return CudaRuntime(device) if device.type == "cuda" else EmulatedRuntime()
