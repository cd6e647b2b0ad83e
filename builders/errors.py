"""Errors of the ground floor. Each says the requirement, what was found, what follows, and what to do."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class BatchError(ValueError):
    """A batch that must not reach a kernel."""


def require(condition: bool, message: str) -> None:
    """Raise BatchError(message) unless condition holds."""
    if not condition:
        raise BatchError(message)


def require_tensor(
    name: str, tensor: torch.Tensor, *, shape: Iterable[int | None], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise BatchError unless a tensor has this shape (None matches any size), dtype and device type."""
    wanted, found = tuple(shape), tuple(tensor.shape)
    fits = len(wanted) == len(found) and all(w in (None, f) for w, f in zip(wanted, found, strict=True))
    if not fits or tensor.dtype != dtype or tensor.device.type != device.type:
        raise BatchError(
            f"{name} must be {dtype} {list(wanted)} on {device.type}, got {tensor.dtype} {list(found)} on "
            f"{tensor.device.type}; a kernel would read it as something else, so nothing was run. Convert it first."
        )
