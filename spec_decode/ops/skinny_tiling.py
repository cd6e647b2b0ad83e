"""How a skinny linear is cut into programs: the one table that tuning on a device changes."""

from __future__ import annotations

from dataclasses import dataclass

MAX_SUMS = 64
"""Sums that a thread keeps in registers."""

MIN_PROGRAMS = 512
"""Fewer would leave multiprocessors of a large GPU idle, or alone with the latency of one program."""


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


_BY_INPUTS = (
    # inputs, without a gate, with one
    (1024, Tiling(4, 1024, 4), Tiling(4, 512, 2)),
    (2048, Tiling(1, 1024, 4), Tiling(4, 512, 2)),
    (4095, Tiling(2, 2048, 4), Tiling(4, 512, 2)),
    (8191, Tiling(2, 2048, 8), Tiling(4, 1024, 4, 3)),
    (8192, Tiling(2, 1024, 4), Tiling(4, 1024, 4, 3)),
    (None, Tiling(4, 1024, 4, 3), Tiling(4, 1024, 4, 3)),
)
"""The fastest for one row of bf16 with up to so many inputs. Measured on an H200 for the layers of drafts of hidden
size 1024 and 4096: 1024, 2048, 2816, 4096, 8192 and 14336 inputs, the gates at 1024 and 4096; others take the next."""


_MORE_ROWS = {
    2: ((1024, Tiling(4, 512, 2), Tiling(4, 256, 2, 3)),),
    4: (
        (1024, Tiling(2, 512, 2), Tiling(4, 256, 2, 3)),
        (2048, Tiling(2, 1024, 4), Tiling(4, 256, 2, 3)),
        (4095, Tiling(2, 512, 2, 3), Tiling(4, 256, 2, 3)),
    ),
}
"""The same for up to so many rows, measured for the draft of hidden size 1024; what is not here goes by one row's."""


def tiling(rows: int, n: int, k: int, *, gated: bool = False, itemsize: int = 2) -> Tiling:
    """The tiling for `rows` rows of k inputs of itemsize bytes an element and n outputs; gated: of two weights."""
    known = (*_MORE_ROWS.get(power_of_two(rows), ()), *_BY_INPUTS)
    plain, with_gate = next(pair for most, *pair in known if most is None or k <= most)
    best = with_gate if gated else plain
    block_n, block_k = best.block_n, min(best.block_k * 2 // itemsize, power_of_two(k))
    while block_n > 1 and n < block_n * MIN_PROGRAMS:
        block_n //= 2
    # More rows have more sums: first those of a second load go, then outputs, since one load fills each thread.
    one_load = best.num_warps * 512 // itemsize
    height = power_of_two(rows) * (2 if gated else 1)
    while height * block_n * block_k > MAX_SUMS * 32 * best.num_warps:
        if block_k > one_load or block_n == 1:
            block_k //= 2
        else:
            block_n //= 2
    return Tiling(block_n, block_k, best.num_warps, best.stages)


def power_of_two(least: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << (least - 1).bit_length()
