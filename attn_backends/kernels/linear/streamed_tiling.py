"""Tilings of streamed linears: everything that tuning on a device changes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from builders.devices import Room
from builders.kernels.sizes import cdiv, next_power_of_2

LEAST_ROWS = 16
"""The smallest narrow side of a tensor core's product."""

MAX_ROWS = 160
"""The most rows per launch: with more, torch's own products are faster."""

MAX_GATED_ROWS = 256
"""The same for a 16-bit gate, whose activation needs a second kernel after torch's product: 0.89 to 0.96 of the time of
both with 192 to 256 rows, 1.01 with 288 (Llama 3's gate and up, H100)."""

MAX_NARROW_ROWS = 256
"""The same for rows in 8 bits, which torch multiplies in 8 bits too: see `most_streamed_rows`."""

_LEAST_IN_USE = 0.8
"""With MAX_GATED_ROWS, each of a gate's tiles is alone on its SM, and SMs without one wait for the last: so much of
their time must be in use. Llama 3's tiles use 0.85 of it; Qwen3's 0.73 and GPT-OSS's 0.68, which take 1.03 and 1.01 of
torch's time with 192 rows, 1.14 and 1.17 with 256 (H100)."""

ROWS_OF_ANY_WEIGHT = 96
"""Up to this many rows, these kernels multiply every weight: with fewer they beat torch's own on an H200, and with 96
they take 0.85 to 1.13 of its time on an H100, with a median of 0.98 over 38 weights."""

_MORE_ROWS = range(4096, 8192 + 1)
"""Inputs of weights that beat torch's with more rows, if split into shares and with at least twice as many inputs as
outputs: 0.82 to 0.93 of its time with 160 rows, others of few outputs 1.01 to 1.28 (H100)."""

_ROWS_BY_THREADS, _NARROW_ROWS_BY_THREADS = 80, 32
"""Up to this many rows in 16 and 8 bits, a program's threads load its tiles about as fast as the bulk copy engine does.
It takes 1.33 of their time with 33 rows in 16 bits, and 0.93 to 1 with 64 in 8 bits (H200)."""

_WHOLE_ROWS = 64
"""Up to this many rows stay in one part."""

_BLOCK_N = 64
"""Weight rows in a tile, the fewest that keep a tensor core busy: more would leave more SMs idle."""

_BLOCK_BYTES = 256
"""Bytes of a row's inputs per load."""

_BLOCK_K = 128
"""The most inputs per load: 8-bit inputs are converted in registers, which would not hold more."""

_BLOCK_K_OF_FEW = 256
"""The same for up to 32 rows, which leave registers free, and for more in a program that is alone on its SM."""

_EVEN = 0.9
"""An 8-bit weight of few outputs is split until tiles keep this share of the SMs busy until the end. 6,144 outputs in
one share take 2.9 times as long as in four with 8 rows, and 1.7 times with 32 (H200)."""

_MOST_STAGES = 6
"""Tiles in flight for a program that is alone on its SM; more gain nothing."""

_SHARED_STAGES = 4
"""Tiles in flight for one of two programs on an SM."""

_GROUP_STAGES = 3
"""Tiles in flight with rows sorted by weight: some of an SM's programs have no rows."""

_MOST_SHARES = 16
_LEAST_BLOCKS = 2
"""The fewest tiles in a share of K: with one, a program would wait for memory with nothing to overlap."""

_MOST_NARROW_SHARES = 8
_LEAST_NARROW_BLOCKS = 5
"""The same for rows in 8 bits: with fewer, reading a share would take no longer than adding the shares up."""

_FEW_SHARES = 4
_BLOCKS_OF_MANY = 5
"""From LEAST_ROWS rows on, more than _FEW_SHARES have at least this many tiles each: eight shares of two or three tiles
took longer to add up than they saved (rounds of a 1024-wide draft, 16 and 32 requests, H100)."""


@dataclass(frozen=True, slots=True)
class StreamedTiling:
    """The size of a program and how it runs.

    block_m   rows
    block_m2  rows after these, or 0
    block_n   weight rows; with a gate half of them are gate rows
    block_k   inputs per iteration
    shares    shares that K is split into
    tma       whether the bulk copy engine loads the tiles
    """

    block_m: int
    block_m2: int
    block_n: int
    block_k: int
    shares: int
    num_warps: int
    stages: int
    tma: bool = False


def most_rows(n: int, k: int, room: Room, *, gated: bool = False) -> int:
    """Return the most rows for which these kernels beat torch's own, for a 16-bit weight of n rows and k inputs. gated:
    it holds gate and up."""
    if not (_rows_are_aligned(k, 2) and room.tma):
        return ROWS_OF_ANY_WEIGHT
    if is_alone(n, room):
        pays = k in _MORE_ROWS and k >= 2 * n and _shares(MAX_ROWS, n, k, room, itemsize=2) > 1
        return MAX_ROWS if pays else ROWS_OF_ANY_WEIGHT
    return _most_gated_rows(n, room) if gated else ROWS_OF_ANY_WEIGHT


def _most_gated_rows(n: int, room: Room) -> int:
    """Return the same for gate and up of n rows together, which leave no SM without a tile."""
    tiles = cdiv(n, 2 * _BLOCK_N)
    if tiles / room.num_sms >= _LEAST_IN_USE * cdiv(tiles, room.num_sms):
        return MAX_GATED_ROWS
    # Up to MAX_ROWS rows, an SM has room for two programs.
    return MAX_ROWS if tiles <= 2 * room.num_sms else ROWS_OF_ANY_WEIGHT


@cache
def streamed_tiling(
    rows: int,
    n: int,
    k: int,
    room: Room,
    *,
    groups: int = 0,
    itemsize: int = 2,
    x_itemsize: int = 2,
    gated: bool = False,
) -> StreamedTiling:
    """Return the tiling for these rows of k inputs of x_itemsize bytes, a weight of n rows of itemsize bytes per input,
    and a device's room.

    x_itemsize is 1, 2 or 4, and itemsize 1 or the same. groups: weights that rows are sorted by; 0: one weight for all
    rows. gated: the weight holds gate and up.
    """
    if x_itemsize == 1 and not groups:
        return _tiling_of_8_bit_rows(rows, n, k, room, gated)
    if itemsize == 1 and not groups and rows <= _WHOLE_ROWS:
        return _tiling_of_8_bits(rows, n, k, room, x_itemsize)
    block_m, block_m2 = (LEAST_ROWS, 0) if groups else row_blocks(rows)
    alone = is_alone(n, room) and not groups
    fills = block_m + block_m2 > MAX_ROWS  # an SM: two programs with this many rows would have too few stages
    shares = _shares(rows, n, k, room, itemsize=itemsize) if alone else 1
    tma = (
        room.tma
        and itemsize == 2
        and not groups
        and _rows_are_aligned(k, itemsize)
        # A gate in a tile of 64 leaves 32 rows for each of its two products: too few for a tensor core's full speed.
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
    # Weight rows that would take as much memory as the weight's and x's tiles together.
    height = block_n + (block_m + block_m2) * (x_itemsize // itemsize)
    if 2 * height * width > room.shared_memory:
        width //= 2  # a device with little shared memory cannot hold two such tiles
    fitting = room.shared_memory // (height * width * (1 if alone or fills else 2))
    stages, num_warps = max(2, min(most, fitting)), 8 if block_m > MAX_ROWS else 4
    return StreamedTiling(block_m, block_m2, block_n, width // itemsize, shares, num_warps, stages, tma)


def _tiling_of_8_bits(rows: int, n: int, k: int, room: Room, x_itemsize: int) -> StreamedTiling:
    """Return the tiling for an 8-bit weight and rows of one tile: the fastest of about 110 for the layers of
    Llama-3-8B, or within a tenth of it (H200; see benchmarks/tune_streamed_linear.py).

    A program waits for a tile, converts it and multiplies it, one after the other. So several small programs share an
    SM: while one converts, others load.
    """
    block_m, tiles, alone = row_blocks(rows)[0], _tiles(n), is_alone(n, room)
    is_small = block_m == LEAST_ROWS or (block_m == 2 * LEAST_ROWS and not alone)
    shares, most = 1, _MOST_SHARES if rows < LEAST_ROWS else _FEW_SHARES
    while alone and shares < most and _in_use(tiles * shares, room) < _EVEN:
        shares *= 2
    if alone and is_small and shares < _FEW_SHARES:
        shares *= 2
    block_k = _BLOCK_K_OF_FEW if is_small or tiles * shares <= room.num_sms else _BLOCK_K
    while shares > 1 and cdiv(k, block_k) < _LEAST_BLOCKS * shares:
        shares //= 2
    block_n = _BLOCK_N
    if is_small:
        many = tiles * shares > 2 * room.num_sms
        block_n, stages = block_n // (1 + (many and alone)), 3 if many else 5
    else:
        stages = 5 if cdiv(k, block_k * shares) > 16 or (block_k, block_m) == (_BLOCK_K, 2 * LEAST_ROWS) else 3
    size = block_n + block_m * x_itemsize
    if 2 * size * block_k > room.shared_memory:
        block_k //= 2
    fitting = room.shared_memory // (size * block_k)
    return StreamedTiling(block_m, 0, block_n, block_k, shares, 2 if is_small else 4, min(stages, fitting))


def _tiling_of_8_bit_rows(rows: int, n: int, k: int, room: Room, gated: bool) -> StreamedTiling:
    """Return the tiling for rows and a weight in 8 bits, which tensor cores read from shared memory as they are: for 32
    to 256 rows and Llama-3-8B's weights, within 2 % of the fastest (H200; see benchmarks/tune_streamed_linear.py).

    Tiles have 128 rows of the weight, since each reads all of x from the L2 cache, in shares that fill the SMs once.
    With more rows a weight of few outputs has tiles of 64: shares are written and read in fp32, 8 n rows bytes each.
    """
    (block_m, block_m2), block_n, fills = row_blocks(rows), 2 * _BLOCK_N, rows > MAX_ROWS
    many, shares = rows > _NARROW_ROWS_BY_THREADS, _narrow_shares(n, k, block_n, room)
    if not fills and ((many and is_alone(n, room)) or 2 * shares * cdiv(n, block_n) < room.num_sms):
        block_n, shares = _BLOCK_N, _narrow_shares(n, k, _BLOCK_N, room)
    pairs = cdiv(n, block_n) > room.num_sms and not fills  # of programs on an SM
    fitting = room.shared_memory // ((block_n + block_m + block_m2) * _BLOCK_K * (2 if pairs else 1))
    stages = max(2, min(_SHARED_STAGES if pairs else _MOST_STAGES, fitting))
    # A gate in a tile of 64 leaves 32 rows for each of its two products.
    tma = room.tma and many and _rows_are_aligned(k, 1) and not (gated and shares == 1 and block_n == _BLOCK_N)
    return StreamedTiling(block_m, block_m2, block_n, _BLOCK_K, shares, 8 if fills else 4, stages, tma)


def _narrow_shares(n: int, k: int, block_n: int, room: Room) -> int:
    """Return the shares of k inputs that give an SM one program at most, with tiles of block_n of a weight's n rows."""
    most = min(_MOST_NARROW_SHARES, room.num_sms // cdiv(n, block_n), cdiv(k, _BLOCK_K) // _LEAST_NARROW_BLOCKS)
    return next_power_of_2(max(1, most) + 1) // 2


def _in_use(programs: int, room: Room) -> float:
    """Return the share of the SMs' time in use, if every SM runs its programs in turn."""
    return programs / (room.num_sms * cdiv(programs, room.num_sms))


def _tiles(n: int) -> int:
    return cdiv(n, _BLOCK_N)


def is_alone(n: int, room: Room) -> bool:
    """Whether every program of a weight of n rows is alone on its SM."""
    return _tiles(n) <= room.num_sms


def _rows_are_aligned(k: int, itemsize: int) -> bool:
    """Whether the bulk copy engine can load tiles of contiguous rows of k inputs."""
    return k * itemsize % 16 == 0


def _width(itemsize: int) -> int:
    """Return the bytes of a weight row per load."""
    return min(_BLOCK_BYTES, _BLOCK_K * itemsize)


def _shares(rows: int, n: int, k: int, room: Room, *, itemsize: int) -> int:
    """Return the split-K shares of k inputs, for a weight whose n rows leave SMs without a tile."""
    blocks = k * itemsize // _width(itemsize)
    most = min(blocks // _LEAST_BLOCKS, _MOST_SHARES)
    if rows >= LEAST_ROWS:
        most = min(most, max(_FEW_SHARES, blocks // _BLOCKS_OF_MANY))
    return max(1, min(room.num_sms // _tiles(n), most))


def row_blocks(rows: int) -> tuple[int, int]:
    """Return the sizes, powers of two, of one or two tiles for the rows: the fewest that leave little empty."""
    whole = max(LEAST_ROWS, next_power_of_2(rows))
    rest = max(LEAST_ROWS, next_power_of_2(rows - whole // 2))
    return (whole // 2, rest) if whole > _WHOLE_ROWS and rest < whole // 2 else (whole, 0)
