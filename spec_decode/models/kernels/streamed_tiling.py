"""How a streamed linear is cut into programs: all that tuning on a device changes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from builders.kernels.sizes import next_power_of_2
from builders.paged import num_sms

LEAST_ROWS = 16
"""The tensor core's narrow side has no fewer."""

MAX_ROWS = 160
"""Rows that a launch takes at most: with more, torch's own products are faster."""

MAX_GATED_ROWS = 256
"""The same with a gate of 16 bits, whose activation torch's product leaves to another kernel: 0.89 to 0.96 of the time
of both with 192 to 256 rows, 1.01 with 288 (Llama 3's gate and up, H100)."""

ROWS_OF_ANY_WEIGHT = 96
"""Up to this many rows these kernels take every weight: with fewer they beat torch's own on an H200, and with 96 they
take 0.85 to 1.13 of its time on an H100, the median of 38 weights 0.98."""

_MORE_ROWS = range(4096, 8192 + 1)
"""Inputs of weights that are faster than torch's with more rows, if they are cut into shares and have twice as many
inputs as outputs: 0.82 to 0.93 of its time with 160 rows, and others of few outputs 1.01 to 1.28 (H100)."""

_ROWS_BY_THREADS = 80
"""Up to this many rows the threads of a program fetch its tiles about as fast as the bulk copy engine does; with 33,
they take three quarters of its time (H200)."""

_WHOLE_ROWS = 64
"""Rows that stay in one part."""

_BLOCK_N = 64
"""Rows of the weight in a tile, the least that keep a tensor core busy: more would leave more multiprocessors idle."""

_BLOCK_BYTES = 256
"""Inputs of a row that are loaded at a time, in bytes."""

_BLOCK_K = 128
"""The most inputs that are loaded at a time: 8-bit ones are converted in registers, which would not hold more."""

_MOST_STAGES = 6
"""Tiles in flight for a program that has its multiprocessor to itself; more gain nothing."""

_SHARED_STAGES = 4
"""Tiles in flight for one of two on a multiprocessor."""

_GROUP_STAGES = 3
"""Tiles in flight where rows are sorted by weight: some of a multiprocessor's programs have no rows."""

_MOST_SHARES = 16
_LEAST_BLOCKS = 2
"""Tiles of a share of K at least: one alone would wait for memory once a program."""


@dataclass(frozen=True, slots=True)
class StreamedTiling:
    """A program's share and how it runs.

    block_m   rows
    block_m2  rows after these, or 0
    block_n   rows of the weight; with a gate half of them are of the gate
    block_k   inputs it takes at once
    shares    parts that K is cut into
    tma       whether the bulk copy engine fetches the tiles
    """

    block_m: int
    block_m2: int
    block_n: int
    block_k: int
    shares: int
    num_warps: int
    stages: int
    tma: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """What a device has: multiprocessors, bytes of shared memory that a program may have, and whether a bulk copy
    engine is to fetch its tiles."""

    num_sms: int
    shared_memory: int
    tma: bool = True


@cache
def room_of(device: torch.device) -> Room:
    """That of a device; on the CPU, whose interpreter has no shared memory, as much as an H200's."""
    if device.type != "cuda":
        return Room(num_sms(device), 227 * 1024)
    properties = torch.cuda.get_device_properties(device)
    shared = int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # not in the stub
    # Later devices have a bulk copy engine too. These tilings were not measured on them.
    return Room(num_sms(device), shared, tma=properties.major == 9 and torch.version.hip is None)


def most_rows(n: int, k: int, room: Room, *, gated: bool = False) -> int:
    """Up to how many rows these kernels beat torch's own, with a weight of n rows of k inputs of 16 bits. gated: the
    weight is of gate and up."""
    if not (_rows_are_aligned(k, 2) and room.tma):
        return ROWS_OF_ANY_WEIGHT
    if _is_alone(n, room):
        pays = k in _MORE_ROWS and k >= 2 * n and _shares(n, k, room, itemsize=2) > 1
        return MAX_ROWS if pays else ROWS_OF_ANY_WEIGHT
    return MAX_GATED_ROWS if gated else ROWS_OF_ANY_WEIGHT


@cache
def streamed_tiling(
    rows: int, n: int, k: int, room: Room, *, groups: int = 0, itemsize: int = 2, gated: bool = False
) -> StreamedTiling:
    """For so many rows, a weight of n rows of k inputs of itemsize bytes, and a device's room.

    An input of x has 2 bytes at least, whatever itemsize is.

    groups: weights that rows are sorted by; 0: there is one, for all rows. gated: the weight is of gate and up.
    """
    block_m, block_m2 = (LEAST_ROWS, 0) if groups else row_blocks(rows)
    alone = _is_alone(n, room) and not groups
    fills = block_m + block_m2 > MAX_ROWS  # a multiprocessor: two programs with so many rows have too few stages
    shares = _shares(n, k, room, itemsize=itemsize) if alone else 1
    tma = (
        room.tma
        and itemsize == 2
        and not groups
        and _rows_are_aligned(k, itemsize)
        # A gate in a tile of 64 leaves 32 rows to each of its two products: too few for a tensor core at full speed.
        and not (gated and alone and shares == 1)
        and rows > _ROWS_BY_THREADS
    )
    block_n, width = _BLOCK_N, _width(itemsize)
    most = _GROUP_STAGES if groups else _MOST_STAGES if alone else _SHARED_STAGES
    if tma and not alone:
        block_n, width = 2 * _BLOCK_N, _BLOCK_BYTES // 2
        most -= gated and not fills
    elif tma and rows > ROWS_OF_ANY_WEIGHT:
        width = _BLOCK_BYTES // 2
    elif tma:
        most -= 1
    # Rows of the weight that would take as much memory as its tile and those of x together.
    height = block_n + (block_m + block_m2) * max(1, 2 // itemsize)
    if 2 * height * width > room.shared_memory:
        width //= 2  # a device with little shared memory does not hold two such tiles
    fitting = room.shared_memory // (height * width * (1 if alone or fills else 2))
    stages, num_warps = max(2, min(most, fitting)), 8 if block_m > MAX_ROWS else 4
    return StreamedTiling(block_m, block_m2, block_n, width // itemsize, shares, num_warps, stages, tma)


def _tiles(n: int) -> int:
    return -(-n // _BLOCK_N)


def _is_alone(n: int, room: Room) -> bool:
    """Whether every program of a weight of n rows has a multiprocessor to itself."""
    return _tiles(n) <= room.num_sms


def _rows_are_aligned(k: int, itemsize: int) -> bool:
    """Whether the bulk copy engine can fetch tiles of contiguous rows of k inputs."""
    return k * itemsize % 16 == 0


def _width(itemsize: int) -> int:
    """Bytes of a row of the weight that are loaded at a time."""
    return min(_BLOCK_BYTES, _BLOCK_K * itemsize)


def _shares(n: int, k: int, room: Room, *, itemsize: int) -> int:
    """Shares of a row of k inputs, of a weight whose n rows leave multiprocessors without a tile."""
    most = k * itemsize // (_LEAST_BLOCKS * _width(itemsize))
    return max(1, min(room.num_sms // _tiles(n), _MOST_SHARES, most))


def row_blocks(rows: int) -> tuple[int, int]:
    """The sizes, powers of two, of one part or two that rows are cut into: the fewest that leave little empty."""
    whole = max(LEAST_ROWS, next_power_of_2(rows))
    rest = max(LEAST_ROWS, next_power_of_2(rows - whole // 2))
    return (whole // 2, rest) if whole > _WHOLE_ROWS and rest < whole // 2 else (whole, 0)
