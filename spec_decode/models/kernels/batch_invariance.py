"""Whether products are batch invariant: the bits of a row do not depend on how many rows are multiplied beside it.

Libraries choose a product's tiles, and so the order of its sums, by the number of rows. In fp32 that changes the last
bits; in bf16 now and then a token. Where a text must not depend on its batch, every product runs as
`batch_invariant_linear`, cut by the weight's sizes alone, and nothing is fused by the number of rows. What torch
computes on the CPU runs `by_row`.
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
    """Make the products of the models' layers batch invariant, or not, in this context. It may be nested."""
    before = _on.set(on)
    try:
        yield
    finally:
        _on.reset(before)


def is_batch_invariant() -> bool:
    """Whether products must be batch invariant here."""
    return _on.get()


def by_row(function: Callable[..., R], *inputs: torch.Tensor) -> R:
    """function(*inputs) of tensors [T, ...]: each row alone where products must be batch invariant, else all at once.

    Torch's CPU code takes other instructions at another alignment, and for the elements that fill no vector. So a row's
    bits depend on where it lies, unless it is copied to an address of its own.
    """
    if not is_batch_invariant() or not len(inputs[0]):
        return function(*inputs)
    rows = [function(*map(_copied, row)) for row in zip(*(x.split(1) for x in inputs), strict=True)]
    if isinstance(rows[0], torch.Tensor):
        return torch.cat(rows)
    return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))


def _copied(row: torch.Tensor) -> torch.Tensor:
    return row.clone(memory_format=torch.contiguous_format)
