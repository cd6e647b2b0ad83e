"""The tiles that a device has room for, of those that a tuner tries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from builders.kernels.triton_runtime import triton

T = TypeVar("T")


def fitting_tiles(tiles: Iterable[T], run: Callable[[T], torch.Tensor], expected: torch.Tensor) -> list[T]:
    """Run a kernel with each of the tiles, which compiles it, and return those that fit, in order. Raises
    AssertionError if a result is wrong."""
    fitting = []
    for tile in tiles:
        try:
            found = run(tile)
        except triton.OutOfResources:
            continue
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        fitting.append(tile)
    return fitting
