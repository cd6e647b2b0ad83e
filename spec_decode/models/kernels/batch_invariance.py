"""Whether products are batch invariant: the bits of a row do not depend on how many rows are multiplied beside it.

Libraries choose a product's tiles, and so the order of its sums, by the number of rows. In fp32 that changes the last
bits; in bf16 now and then a token. Where a text must not depend on its batch, every product runs as
`batch_invariant_linear`, cut by the weight's sizes alone, and nothing is fused by the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

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
