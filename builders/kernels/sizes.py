"""Sizes of grids and blocks, on the host: Triton's own functions take 2 us a call there, in every launch."""

from __future__ import annotations


def cdiv(size: int, block: int) -> int:
    """How many blocks hold so many: size / block, rounded up."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is no less than 1 and size."""
    return 1 << max(0, size - 1).bit_length()
