"""Poisoned memory: NaN wherever nothing was written, so reading it is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

_GARBAGE = 85
"""Every byte of an 8-bit integer; a count, a lock or an index that starts from it is wrong."""


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Within this context, torch.empty and its variants return NaN, and nonzero integers, so reading memory before it
    is written is noticed."""

    def poisoned(allocate: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else _GARBAGE)

        return wrapper

    with (
        mock.patch.object(torch, "empty", poisoned(torch.empty)),
        mock.patch.object(torch, "empty_like", poisoned(torch.empty_like)),
        mock.patch.object(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty)),
    ):
        yield


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View the elements as integers of the same width and shape, so that a poisoned one equals itself."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
