"""How a streamed linear is cut into programs: all that tuning on a device changes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from builders.paged import num_sms

LEAST_ROWS = 16
"""The tensor core's narrow side has no fewer."""

_WHOLE_ROWS = 64
"""Rows that stay in one part."""

_BLOCK_BYTES = 256
"""Inputs of a row that are loaded at a time, in bytes."""

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

    block_t     rows
    block_more  rows after these, or 0
    block_n     rows of the weight; with a gate half of them are of the gate
    block_k     inputs it takes at once
    shares      parts that K is cut into
    """

    block_t: int
    block_more: int
    block_n: int
    block_k: int
    shares: int
    num_warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Room:
    """What a device has: multiprocessors, and bytes of shared memory that a program may have."""

    num_sms: int
    shared_memory: int


@cache
def room_of(device: torch.device) -> Room:
    """That of a device; on the CPU, whose interpreter has no shared memory, as much as an H200's."""
    if device.type != "cuda":
        return Room(num_sms(device), 227 * 1024)
    properties = torch.cuda.get_device_properties(device)
    return Room(num_sms(device), int(properties.shared_memory_per_block_optin))  # type: ignore[attr-defined]  # not in the stub


def streamed_tiling(rows: int, n: int, k: int, room: Room, *, groups: int = 0, itemsize: int = 2) -> StreamedTiling:
    """For so many rows, a weight of n rows of k inputs of itemsize bytes, and a device's room.

    groups: weights that rows are sorted by; 0: there is one, for all rows.
    """
    block_t, block_more = (LEAST_ROWS, 0) if groups else _row_blocks(rows)
    block_n, block_k, warps = 64, _BLOCK_BYTES // itemsize, 4
    tiles = -(-n // block_n)
    alone = tiles <= room.num_sms and not groups
    shares = max(1, min(room.num_sms // tiles, _MOST_SHARES, k // (_LEAST_BLOCKS * block_k))) if alone else 1
    fitting = room.shared_memory // ((block_t + block_more + block_n) * _BLOCK_BYTES * (1 if alone else 2))
    stages = max(2, min(_MOST_STAGES if alone else _GROUP_STAGES if groups else _SHARED_STAGES, fitting))
    return StreamedTiling(block_t, block_more, block_n, block_k, shares, warps, stages)


def _row_blocks(rows: int) -> tuple[int, int]:
    """The sizes, powers of two, of one part or two that rows are cut into: the fewest that leave little empty."""
    whole = max(LEAST_ROWS, power_of_two(rows))
    rest = max(LEAST_ROWS, power_of_two(rows - whole // 2))
    return (whole // 2, rest) if whole > _WHOLE_ROWS and rest < whole // 2 else (whole, 0)


def power_of_two(least: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << (least - 1).bit_length()
