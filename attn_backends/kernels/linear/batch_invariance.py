"""Switch for batch-invariant products: the bits of a row do not depend on how many rows are multiplied with it.

Libraries choose a product's tiles, and so its order of summation, by the number of rows. In fp32 that changes the last
bits; in bf16 it occasionally changes a token. If a text must not depend on its batch, every product runs as
`batch_invariant_linear`, tiled only by the weight's sizes, and the number of rows decides no fusion. torch's CPU code
runs `by_row`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch

R = TypeVar("R", torch.Tensor, tuple[torch.Tensor, ...])

_on: ContextVar[bool] = ContextVar("batch_invariant", default=False)


@contextmanager
def batch_invariance(on: bool) -> Iterator[None]:
    """Switch batch-invariant products of the models' layers on or off in this context. Can be nested."""
    before = _on.set(on)
    try:
        yield
    finally:
        _on.reset(before)


def is_batch_invariant() -> bool:
    """Whether products must be batch invariant in this context."""
    return _on.get()


def by_row(function: Callable[..., R], *inputs: torch.Tensor) -> R:
    """Return function(*inputs) for tensors [T, ...]: row by row under `batch_invariance`, else all at once.

    torch's CPU code uses other instructions for another alignment, and for the elements that do not fill a vector. So a
    row's bits depend on its address, unless it is copied to a fresh allocation.
    """
    if not is_batch_invariant() or not len(inputs[0]):
        return function(*inputs)
    rows = [function(*map(_copied, row)) for row in zip(*(x.split(1) for x in inputs), strict=True)]
    if isinstance(rows[0], torch.Tensor):
        return torch.cat(rows)
    return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))


def _copied(row: torch.Tensor) -> torch.Tensor:
    return row.clone(memory_format=torch.contiguous_format)
