"""Raise on host syncs while code runs that must not wait for the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from spec_decode.graphs.dispatch_mode import PlainDispatchMode
from spec_decode.graphs.emulator import HOST_READS, host_read, tensors_of
from spec_decode.testing.error_location import error_location
from spec_decode.testing.outcome import CheckFailure


class HostRead(RuntimeError):
    """The host read device data; the message names the operation."""


@contextmanager
def expect_no_wait(contract: str, expected: str) -> Iterator[None]:
    """Turn a RuntimeError inside, from a host sync or a failed capture, into a CheckFailure with its location."""
    try:
        yield
    except RuntimeError as error:
        raise CheckFailure(contract=contract, expected=expected, got=f"{error}{error_location(error)}") from error


@contextmanager
def refuse_cuda_waits() -> Iterator[None]:
    """Within this context, any wait for a CUDA device raises RuntimeError."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def refuse_host_reads(device: torch.device, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within this context, reading these tensors, or anything computed from them, raises HostRead.

    On CUDA any wait for the device raises RuntimeError instead. On a CPU, other tensors are taken for the host's.
    """
    if device.type == "cuda":
        with refuse_cuda_waits():
            yield
        return
    operations = _Operations(tensors)
    with _Methods(operations), operations:
        yield


class _Operations(PlainDispatchMode):
    """Tracks what is computed from the device's tensors, and rejects operations that pass it to the host."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._kept = list(tensors)
        self._on_device = {_storage(tensor) for tensor in self._kept}

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reads = self.any_on_device((args, *kwargs.values()))
        if reads and (why := host_read(func, args)):
            raise HostRead(f"{func._schema.name} {why}")
        result = func(*args, **kwargs)
        if reads:
            written = tensors_of((args, result))
            self._kept += written
            self._on_device |= {_storage(tensor) for tensor in written}
        return result

    def any_on_device(self, values: Any) -> bool:
        """Whether any of these tensors is on the device."""
        return any(_storage(tensor) in self._on_device for tensor in tensors_of(values))


class _Methods(TorchFunctionMode):
    """Rejects the reads that no dispatched operation shows."""

    def __init__(self, operations: _Operations) -> None:
        super().__init__()
        self._operations = operations

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in HOST_READS and self._operations.any_on_device(args):
            raise HostRead(f"Tensor.{func.__name__} reads device data on the host")
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
