"""The Triton kernels of hyper_connections; hyper_connections.py holds their contract.

Legend: T tokens, S streams, H hidden size. Tensors are contiguous. A program owns one token and BLOCK_H of its columns;
the matrix that mixes the streams is normalised step by step, so that a program of its own does it beside the others.
"""

from __future__ import annotations

from builders.kernels.triton_runtime import await_previous, tl, triton


@triton.jit
def read_streams_kernel(
    streams, mixes, scale, base, x, write, carry, eps, S: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr,
    ITERATIONS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [T, H] from streams [T, S, H] and mixes [T, WIDTH]; with ITERATIONS write [T, S] and carry [T, S, S] too."""
    await_previous(PDL)
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    mixes += token * WIDTH
    if block < BLOCKS:
        column = block * BLOCK_H + tl.arange(0, BLOCK_H)
        total = tl.zeros([BLOCK_H], tl.float32)
        for stream in tl.static_range(S):
            share = _sigmoid(tl.load(mixes + stream) * tl.load(scale) + tl.load(base + stream)) + eps
            part = tl.load(streams + (token * S + stream) * H + column, mask=column < H, other=0.0)
            total += share * part.to(tl.float32)
        tl.store(x + token * H + column, total.to(x.dtype.element_ty), mask=column < H)
    elif ITERATIONS > 0:
        _connect(mixes, scale, base, write + token * S, carry + token * S * S, eps, S, ITERATIONS, BLOCK_S)


@triton.jit
def _connect(mixes, scale, base, write, carry, eps, S: tl.constexpr, ITERATIONS: tl.constexpr, BLOCK_S: tl.constexpr):
    """One token's write [S] and carry [S, S]."""
    stream = tl.arange(0, BLOCK_S)
    inside = stream < S
    writes = tl.load(mixes + S + stream, mask=inside, other=0.0) * tl.load(scale + 1)
    writes += tl.load(base + S + stream, mask=inside, other=0.0)
    tl.store(write + stream, 2.0 * _sigmoid(writes), mask=inside)

    at = stream[:, None] * S + stream[None, :]
    square = inside[:, None] & inside[None, :]
    matrix = tl.load(mixes + 2 * S + at, mask=square, other=0.0) * tl.load(scale + 2)
    matrix += tl.load(base + 2 * S + at, mask=square, other=0.0)
    # Columns beyond the streams weigh nothing; rows beyond them stay finite and are then zeroed.
    matrix = tl.where(inside[None, :], matrix, float("-inf"))
    matrix = tl.exp(matrix - tl.max(matrix, 1)[:, None])
    matrix = tl.where(square, matrix / tl.sum(matrix, 1)[:, None] + eps, 0.0)
    matrix = matrix / (tl.sum(matrix, 0)[None, :] + eps)
    for _ in range(ITERATIONS - 1):
        matrix = matrix / (tl.sum(matrix, 1)[:, None] + eps)
        matrix = matrix / (tl.sum(matrix, 0)[None, :] + eps)
    tl.store(carry + at, matrix, mask=square)


@triton.jit
def _sigmoid(logits):
    return 1.0 / (1.0 + tl.exp(-logits))


@triton.jit
def write_streams_kernel(
    streams, output, write, carry, out,
    S: tl.constexpr, H: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [T, S, H] from streams [T, S, H], output [T, H], write [T, S] and carry [T, S, S]."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    stream, column = tl.arange(0, BLOCK_S), tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside, owned = stream < S, column < H
    first = token * S
    added = tl.load(output + token * H + column, mask=owned, other=0.0).to(tl.float32)
    total = tl.load(write + first + stream, mask=inside, other=0.0)[:, None] * added[None, :]
    for source in tl.static_range(S):
        shares = tl.load(carry + (first + source) * S + stream, mask=inside, other=0.0)
        part = tl.load(streams + (first + source) * H + column, mask=owned, other=0.0).to(tl.float32)
        total += shares[:, None] * part[None, :]
    at = (first + stream[:, None]) * H + column[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside[:, None] & owned[None, :])
