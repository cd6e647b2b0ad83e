"""Sizes of grids and blocks, on the host: Triton's own functions take 2 us per call there, in every launch."""

from __future__ import annotations


def cdiv(size: int, block: int) -> int:
    """Return size / block, rounded up."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """Return the smallest power of two that is at least 1 and at least size."""
    return 1 << max(0, size - 1).bit_length()
