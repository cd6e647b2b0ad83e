"""How much of a paged cache a program loads at once, by what a device has room for."""

from __future__ import annotations

from typing import NamedTuple

from builders.devices import Room
from builders.kernels.sizes import next_power_of_2

_PROGRAMS = 2
"""Programs that an SM runs at once: while one waits for a block of keys and values, the other multiplies."""
_BLOCK_BYTES = 64 << 10
"""Of keys and values in flight per program. Two such programs load faster than more programs with smaller blocks:
8 x 8 tokens after 32,768 take 272 us in blocks of 128 tokens, 276 in three programs of 64 (H200, heads of 128 dims)."""
_MOST_TOKENS = 256
"""Of a block: their scores fill half of the registers."""


class Block(NamedTuple):
    """What an SM works on at once: `programs`, each on a block of `tokens` KV tokens."""

    tokens: int
    programs: int


def block_of(rows: int, row_bytes: int, itemsize: int, room: Room) -> Block:
    """Return the largest block, of 16 tokens or more, for which an SM has shared memory in _PROGRAMS programs; if there
    is none, in one.

    rows: query rows of a program; row_bytes: of a token's key and value in the query's dtype; itemsize: the dtype's.
    """
    buffers = 2 if rows >= 64 and room.wgmma else 1  # Triton loads a second block during wgmma, which takes 64 rows
    most = next_power_of_2(_BLOCK_BYTES // buffers // row_bytes + 1) // 2
    for programs in (_PROGRAMS, 1):
        tokens = min(most, _MOST_TOKENS)
        while tokens >= 16:
            shared = buffers * tokens * row_bytes + rows * (row_bytes // 2 + tokens * itemsize)
            if programs * (shared + 1024) <= room.shared_memory + 1024:
                return Block(tokens, programs)
            tokens //= 2
    return Block(16, 1)
