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


def require_counts(name: str, values: Iterable[object]) -> None:
    """Raise BatchError unless every value is an int: a tensor of ints would round another number without a word."""
    if wrong := [value for value in values if not isinstance(value, int)]:
        raise BatchError(
            f"{name} must be ints, got {wrong[0]!r}; a tensor would hold another, so nothing was changed. Convert it."
        )


def require_tensor(
    name: str, tensor: torch.Tensor, *, shape: Iterable[int | None], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise BatchError unless a tensor has this shape (None matches any size), this dtype and is on this device.

    A device without an index matches every one of its type.
    """
    wanted, found = tuple(shape), tuple(tensor.shape)
    fits = len(wanted) == len(found) and all(w in (None, f) for w, f in zip(wanted, found, strict=True))
    if not fits or tensor.dtype != dtype or not _same_device(tensor.device, device):
        raise BatchError(
            f"{name} must be {dtype} {list(wanted)} on {device}, got {tensor.dtype} {list(found)} on "
            f"{tensor.device}; a kernel would read it as something else, so nothing was run. Convert it first."
        )


def _same_device(found: torch.device, wanted: torch.device) -> bool:
    return found == wanted or (found.type == wanted.type and None in (found.index, wanted.index))
