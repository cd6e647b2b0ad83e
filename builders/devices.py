"""The current CUDA device, where Triton launches and streams and events are made; and copies to a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device the current one for a block; does nothing where it is, and for other devices."""
    if device.type != "cuda" or device.index is None or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def staged(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """The values as int64 on a device, by a copy that nobody waits for: pinned memory lives until it has run."""
    return pinned(torch.tensor(values, dtype=torch.int64, device="cpu"), device).to(device, non_blocking=True)


def pinned(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on the host, where the device is CUDA in pinned memory, which it can be copied from without a wait."""
    return host.pin_memory() if device.type == "cuda" else host


def on_own_device(method: F) -> F:
    """A method that runs with its object's `device` as the current one."""

    @wraps(method)
    def run(self: Any, *args: Any, **options: Any) -> Any:
        with on_device(self.device):
            return method(self, *args, **options)

    return cast("F", run)
