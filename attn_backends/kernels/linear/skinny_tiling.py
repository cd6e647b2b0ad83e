"""Tilings of skinny linears: everything that tuning on a device changes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from builders.kernels.sizes import next_power_of_2

MAX_ROWS = 2
"""With more rows, the products take longer than reading the weight (measured on an H200)."""

MAX_SUMS = 64
"""The most sums that a thread keeps in registers."""

MIN_PROGRAMS = 512
"""The fewest programs: fewer would leave SMs of a large GPU idle, or each with the latency of one program."""

_LONE_OUTPUTS = 256
"""Up to this many outputs, a program is nearly alone on its SM, and only the number of its waits matters."""

_AT_ONCE = 16384
"""The most inputs that such a program loads at once: all inputs of a row if they fit; otherwise those of all its rows
together, since its sums then wait in registers for the next load."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """The size of a program and how it runs.

    block_n   outputs of a program; with a gate, this many gate rows and this many up rows
    block_k   inputs per iteration; the best load is 16 bytes per thread, which is num_warps * 256 elements of bf16
    stages    tiles in flight through shared memory; 1 loads them into registers
    """

    block_n: int
    block_k: int
    num_warps: int
    stages: int = 1


MANY_OUTPUTS = 8192
"""A layer with more outputs, such as an output projection, is bound by bandwidth only; smaller ones also by latency."""


@dataclass(frozen=True, slots=True)
class _Row:
    """The fastest tilings for up to this many inputs: few outputs, more than MANY_OUTPUTS, and with a gate."""

    inputs: float
    few: Tiling
    many: Tiling
    gated: Tiling


_TABLE = {
    1: (
        _Row(1024, Tiling(2, 1024, 4), Tiling(4, 512, 2), Tiling(2, 1024, 4)),
        _Row(2048, Tiling(1, 1024, 4), Tiling(8, 512, 4, 3), Tiling(4, 512, 2, 3)),
        _Row(4095, Tiling(1, 1024, 8), Tiling(8, 512, 4, 3), Tiling(4, 512, 2, 3)),
        _Row(4096, Tiling(2, 2048, 8), Tiling(2, 2048, 8), Tiling(4, 1024, 4, 3)),
        _Row(math.inf, Tiling(1, 2048, 8), Tiling(4, 512, 2, 3), Tiling(4, 512, 2, 3)),
    ),
    2: (
        _Row(1024, Tiling(2, 512, 2), Tiling(4, 512, 2), Tiling(2, 512, 2, 3)),
        _Row(2048, Tiling(1, 1024, 4), Tiling(8, 256, 2, 3), Tiling(4, 256, 2, 3)),
        _Row(4095, Tiling(2, 1024, 4), Tiling(8, 256, 2, 3), Tiling(4, 256, 2, 3)),
        _Row(math.inf, Tiling(4, 512, 2, 3), Tiling(8, 256, 2, 3), Tiling(2, 512, 2, 3)),
    ),
    4: (
        _Row(1024, Tiling(2, 512, 2), Tiling(4, 256, 2, 3), Tiling(2, 256, 2, 3)),
        _Row(4095, Tiling(2, 1024, 4), Tiling(4, 256, 2, 3), Tiling(2, 256, 2, 3)),
        _Row(math.inf, Tiling(4, 256, 2, 3), Tiling(4, 256, 2, 3), Tiling(2, 256, 2, 3)),
    ),
}
"""Tilings for bf16, by the most rows that they apply to. Measured on an H200 for the layers of drafts of hidden size
1024, 2880 and 4096: 1024 to 17280 inputs, few outputs 1024 to 6144, many 32000 to 128256. Unmeasured sizes use their
neighbour's: many outputs of 1025 to 2048 or over 4096 inputs, and gates of other than 1024, 2880 and 4096."""


_SMALL_WEIGHT = 3 << 20
"""Elements of a weight whose reading takes less time than starting and ending the programs of a streamed linear."""


def most_skinny_rows(n: int, k: int) -> int:
    """Return the most rows for which a skinny linear beats a streamed one, with a weight of n rows and k inputs.

    Measured on an H200 for the layers of six drafts. Over two rows, a streamed linear takes 0.64 to 0.99 of a skinny
    one's time for large weights, and 1.0 to 1.2 for small ones. Over one row it takes 0.93 to 1.5, with and without a
    norm, and 1.03 for a draft's whole step in most of them.
    """
    return MAX_ROWS if n * k < _SMALL_WEIGHT else 1


@cache
def tile_of(rows: int, n: int, k: int, *, gated: bool = False, itemsize: int = 2) -> Tiling:
    """Return `tiling`'s choice, or with so few outputs that programs are nearly alone, one with few waits."""
    if gated or n > _LONE_OUTPUTS:
        return tiling(rows, n, k, gated=gated, itemsize=itemsize)
    whole = next_power_of_2(k)
    return Tiling(1, whole if whole <= _AT_ONCE else _AT_ONCE // next_power_of_2(rows), num_warps=16)


def tiling(rows: int, n: int, k: int, *, gated: bool = False, itemsize: int = 2) -> Tiling:
    """Look up the tiling for `rows` rows, n outputs and k inputs of itemsize bytes. gated: two weights."""
    row = next(row for row in _TABLE[next_power_of_2(rows)] if k <= row.inputs)
    best = row.gated if gated else row.many if n > MANY_OUTPUTS else row.few
    block_n, block_k = best.block_n, min(best.block_k * 2 // itemsize, next_power_of_2(k))
    while block_n > 1 and n < block_n * MIN_PROGRAMS:
        block_n //= 2
    # More rows need more sums: first drop second loads, then outputs, since one load keeps each thread busy.
    one_load = best.num_warps * 512 // itemsize
    height = next_power_of_2(rows) * (2 if gated else 1)
    while height * block_n * block_k > MAX_SUMS * 32 * best.num_warps:
        if block_k > one_load or block_n == 1:
            block_k //= 2
        else:
            block_n //= 2
    return Tiling(block_n, block_k, best.num_warps, best.stages)
