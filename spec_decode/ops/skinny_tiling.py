"""How a skinny linear is cut into programs: the one table that tuning on a device changes."""

from __future__ import annotations

from dataclasses import dataclass

_MATVEC_SUMS = 4
"""Up to so many sums an output (rows, twice with a gate) are kept without tensor cores, which would run nearly empty;
more do not fit into registers."""

_SHARED_MEMORY = 96 * 1024
"""Bytes a program may hold in flight: every GPU from Ampere on can give them."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """A program's share and how it runs.

    dot       on tensor cores, at least 16 rows a tile; else multiplied and summed one by one
    block_n   outputs of a program; with a gate, as many gate rows and as many up rows
    block_k   inputs it takes at once; without dot at best 16 bytes a thread, which is num_warps * 256 of bf16
    stages    tiles in flight through shared memory; 1 loads them into registers
    """

    dot: bool
    block_n: int
    block_k: int
    num_warps: int
    stages: int


def tile_rows(rows: int, *, dot: bool) -> int:
    """Rows of a tile that holds all `rows`: a power of two, and a tensor core's 16 where it is one's."""
    return max(16 if dot else 1, _power_of_two(rows))


def tiling(rows: int, n: int, k: int, *, weights: int = 1, itemsize: int = 2) -> Tiling:
    """The tiling for `rows` rows of k inputs, n outputs, and `weights` matrices [n, k] of itemsize bytes an element.

    Fewer outputs take smaller blocks, so that programs outnumber the multiprocessors of a large GPU.
    """
    if rows * weights <= _MATVEC_SUMS:
        block_n = 4 if rows * weights == 1 and n >= 4096 else 2
        return Tiling(dot=False, block_n=block_n, block_k=min(1024, _power_of_two(k)), num_warps=4, stages=1)
    block_n, stages = (16 if n < 8192 else 32), 4
    # Beside x there may be a second tile of its size: what is added to it, or the embedding.
    tiles = 2 * tile_rows(rows, dot=True) + weights * block_n
    fitting = _power_of_two(_SHARED_MEMORY // (stages * itemsize * tiles) + 1) // 2
    block_k = max(16, min(256, fitting, _power_of_two(k)))
    return Tiling(dot=True, block_n=block_n, block_k=block_k, num_warps=4, stages=stages)


def _power_of_two(least: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << (least - 1).bit_length()
