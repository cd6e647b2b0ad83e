"""The current CUDA device, which Triton launches, streams and events use; what a device has; copies to a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device current for a block; a no-op if it already is, and for other device types."""
    if device.type != "cuda" or device.index is None or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def staged(values: Sequence[int] | Sequence[Sequence[int]] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy the values to a device as int64, as `stage_into` does."""
    host = torch.as_tensor(values, dtype=torch.int64, device="cpu")
    return stage_into(torch.empty_like(host, device=device), host)


def stage_into(buffer: torch.Tensor, values: Sequence[float] | torch.Tensor) -> torch.Tensor:
    """Copy the values into a buffer of their shape without a sync; pinned memory stays alive until the copy has run."""
    host = torch.as_tensor(values, dtype=buffer.dtype, device="cpu")
    return buffer.copy_(host.pin_memory() if buffer.is_cuda else host, non_blocking=True)


def on_own_device(method: F) -> F:
    """Make a method run with its object's `device` as the current one."""

    @wraps(method)
    def run(self: Any, *args: Any, **options: Any) -> Any:
        with on_device(self.device):
            return method(self, *args, **options)

    return cast("F", run)


@cache
def num_sms(device: torch.device) -> int:
    """Return the SMs of a device; a few on the CPU, so that runs there take the split path too."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 8


@dataclass(frozen=True, slots=True)
class Room:
    """What tiles are chosen by.

    num_sms        SMs
    shared_memory  bytes per program
    tma            whether to load tiles with a bulk copy engine
    wgmma          whether a product can read both operands from shared memory, in tiles of 64 rows or more
    """

    num_sms: int
    shared_memory: int
    tma: bool = True
    wgmma: bool = True


@cache
def room_of(device: torch.device) -> Room:
    """Return a device's resources; for the CPU, whose interpreter has no shared memory, use an H200's."""
    if device.type != "cuda":
        return Room(num_sms(device), 227 * 1024)
    properties = torch.cuda.get_device_properties(device)
    shared = int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # not in the stub
    # Later devices also have a bulk copy engine, but no tiling was measured on them.
    hopper = properties.major == 9 and torch.version.hip is None
    return Room(num_sms(device), shared, tma=hopper, wgmma=hopper)


FP8_CAPABILITY = (8, 9)
"""The lowest compute capability with instructions that convert float8_e4m3fn."""


def converts_fp8(device: torch.device) -> bool:
    """Return whether kernels on the device can convert float8_e4m3fn; in the interpreter they can."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
