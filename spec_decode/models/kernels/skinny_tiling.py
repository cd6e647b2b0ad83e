"""How a skinny linear is cut into programs: all that tuning on a device changes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from builders.kernels.sizes import next_power_of_2

MAX_ROWS = 2
"""Above it the products themselves would take longer than reading the weight (measured on an H200)."""

MAX_SUMS = 64
"""Sums that a thread keeps in registers."""

MIN_PROGRAMS = 512
"""Fewer would leave num_sms of a large GPU idle, or alone with the latency of one program."""

_LONE_OUTPUTS = 256
"""Up to so many outputs, a program is nearly alone on its multiprocessor: what counts is how few times it waits."""

_AT_ONCE = 16384
"""Inputs that such a program loads at once, where they are all of them; else those of all its rows together, since
its sums then wait in registers for the next."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """A program's share and how it runs.

    block_n   outputs of a program; with a gate, as many gate rows and as many up rows
    block_k   inputs it takes at once; a load is at best 16 bytes a thread, which is num_warps * 256 of bf16
    stages    tiles in flight through shared memory; 1 loads them into registers
    """

    block_n: int
    block_k: int
    num_warps: int
    stages: int = 1


MANY_OUTPUTS = 8192
"""A layer with more is bound by bandwidth alone, as an output projection is; one with fewer also by its latency."""


@dataclass(frozen=True, slots=True)
class _Row:
    """The fastest with up to so many inputs: with few outputs, with more than MANY_OUTPUTS, and with a gate."""

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
"""By rows up to which it holds, for bf16. Measured on an H200 for the layers of drafts of hidden size 1024, 2880 and
4096: 1024 to 17280 inputs, few outputs 1024 to 6144, many 32000 to 128256. What was not measured has its neighbour's:
many outputs of 1025 to 2048 or more than 4096 inputs, and gates of other than 1024, 2880 and 4096."""


_SMALL_WEIGHT = 3 << 20
"""Elements of a weight that is read faster than a streamed linear's programs begin and end."""


def most_skinny_rows(n: int, k: int) -> int:
    """Up to how many rows a skinny linear beats a streamed one, with a weight of n rows of k inputs.

    Measured on an H200 for the layers of six drafts: over two rows a streamed linear takes 0.64 to 0.99 of a skinny
    one's time where the weight is large, and 1.0 to 1.2 where it is small; over one row 0.93 to 1.5, alone and with a
    norm, and 1.03 for a draft's whole step in most of them.
    """
    return MAX_ROWS if n * k < _SMALL_WEIGHT else 1


@cache
def tile_of(rows: int, n: int, k: int, *, gated: bool = False, itemsize: int = 2) -> Tiling:
    """As `tiling` has it; but with so few outputs that programs are nearly alone, one that seldom waits."""
    if gated or n > _LONE_OUTPUTS:
        return tiling(rows, n, k, gated=gated, itemsize=itemsize)
    whole = next_power_of_2(k)
    return Tiling(1, whole if whole <= _AT_ONCE else _AT_ONCE // next_power_of_2(rows), num_warps=16)


def tiling(rows: int, n: int, k: int, *, gated: bool = False, itemsize: int = 2) -> Tiling:
    """The table's, for `rows` rows of k inputs of itemsize bytes an element and n outputs; gated: of two weights."""
    row = next(row for row in _TABLE[next_power_of_2(rows)] if k <= row.inputs)
    best = row.gated if gated else row.many if n > MANY_OUTPUTS else row.few
    block_n, block_k = best.block_n, min(best.block_k * 2 // itemsize, next_power_of_2(k))
    while block_n > 1 and n < block_n * MIN_PROGRAMS:
        block_n //= 2
    # More rows have more sums: first those of a second load go, then outputs, since one load fills each thread.
    one_load = best.num_warps * 512 // itemsize
    height = next_power_of_2(rows) * (2 if gated else 1)
    while height * block_n * block_k > MAX_SUMS * 32 * best.num_warps:
        if block_k > one_load or block_n == 1:
            block_k //= 2
        else:
            block_n //= 2
    return Tiling(block_n, block_k, best.num_warps, best.stages)
