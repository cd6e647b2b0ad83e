"""Compiling the kernels of a product before anybody waits for them: other numbers of rows launch others, and each takes
up to seconds to compile when it is first launched."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol

import torch

from attn_backends.kernels.linear.streamed_tiling import MAX_NARROW_ROWS, MAX_ROWS

_MOST_ROWS = max(MAX_NARROW_ROWS + 1, 2 * MAX_ROWS)
"""More rows launch what these do: torch's product, or our kernels in parts, of which the last can have any number of
rows."""


class Product(Protocol):
    """The record of an op that multiplies rows x [M, K]."""

    @property
    def x(self) -> torch.Tensor: ...

    def variant(self) -> Hashable:
        """Return what tells the kernels that are compiled for this number of rows from those for others."""

    def _replace(self, *, x: torch.Tensor) -> Product: ...

    def __iter__(self) -> Iterator[Any]: ...


_warm: set[Hashable] = set()
"""Products whose kernels this process has compiled: their op, dtypes, shapes and devices."""


def warm_up(op: Callable[..., object], product: Product) -> None:
    """Launch the op once for each kernel that some number of rows needs, the first time that the process has a product
    of these shapes.

    Does nothing on a CPU. Not to be called during a capture or a compiler's trace. product: without rows, x [0, K]; the
    rest is what will be multiplied, and is only read.
    """
    if not product.x.is_cuda:
        return
    key = (op, *((each.shape, each.dtype, each.device) if isinstance(each, torch.Tensor) else each for each in product))
    if key in _warm:
        return
    # Our products support no gradients, and torch's own would be chosen.
    with torch.no_grad():
        for part in by_variant(product):
            op(*part)
    _warm.add(key)


def by_variant(product: Product) -> list[Product]:
    """Return the product for the fewest rows of each variant."""
    rows = product.x.new_zeros(_MOST_ROWS, product.x.shape[1])
    parts = (product._replace(x=rows[:count]) for count in range(_MOST_ROWS, 0, -1))
    return list({part.variant(): part for part in parts}.values())
