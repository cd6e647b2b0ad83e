"""The Triton kernel of skinny_linear; skinny_linear.py holds its contract.

A program owns BLOCK_N outputs (with GATED their gate rows and their up rows) of BLOCK_T rows and walks all of K, so
that a result has one order of summation whatever the device does. Legend: T rows, N outputs, K inputs of a row.
"""

from __future__ import annotations

from builders.kernels.triton_runtime import await_previous, tl, triton


@triton.jit
def matvec_kernel(
    x, weight, token_ids, embedding, delta, norm, residual, total, out, rows, vocab, x_stride, eps,
    N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, EVICTION: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Products in fp32, summed over K at the end: for so few rows that a tensor core would run nearly empty."""
    await_previous(PDL)
    # Every tile has three axes, T, N and K, so that no load needs another layout than the products.
    row = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None, None]
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows_of_weight = weight + output[None, :, None].to(tl.int64) * K
    token = _token(token_ids, row, rows)
    sums = tl.zeros([BLOCK_T, BLOCK_N, BLOCK_K], tl.float32)
    up_sums = tl.zeros([BLOCK_T, BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_T, 1, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_K)[None, None, :]
        owned = (output[None, :, None] < N) & (column < K)
        factor = tl.load(rows_of_weight + column, mask=owned, other=0.0, eviction_policy=EVICTION)
        wide = _input(x, x_stride, embedding, token, vocab, delta, total, row, column, rows, K)
        if eps is not None:
            squares += wide * wide
        if norm is not None:
            wide *= tl.load(norm + column, mask=column < K, other=0.0).to(tl.float32)
        sums += wide * factor.to(tl.float32)
        if GATED:
            up = tl.load(rows_of_weight + N * K + column, mask=owned, other=0.0, eviction_policy=EVICTION)
            up_sums += wide * up.to(tl.float32)
    result, up_result, square = tl.sum(sums, 2), tl.sum(up_sums, 2), tl.sum(squares, 2)
    row = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    _finish(result, up_result, square, eps, residual, out, row, output[None, :], rows, N, K, GATED)


@triton.jit
def _token(token_ids, row, rows):
    """The token of each row, shaped as row; 0 where there are no tokens."""
    return tl.load(token_ids + row, mask=row < rows, other=0) if token_ids is not None else row * 0


@triton.jit
def _input(x, x_stride, embedding, token, vocab, delta, total, row, column, rows, K: tl.constexpr):
    """What the rows hold at the columns, fp32: x, x + delta, or the token's embedding beside x."""
    inside = (row < rows) & (column < K)
    if embedding is not None:
        width: tl.constexpr = K // 2
        # An id outside the vocabulary must not lead the read out of the table.
        known = inside & (column < width) & (token >= 0) & (token < vocab)
        embedded = tl.load(embedding + token * width + column, mask=known, other=0.0)
        beside = tl.load(x + row * x_stride + column - width, mask=inside & (column >= width), other=0.0)
        wide = embedded.to(tl.float32) + beside.to(tl.float32)
    else:
        wide = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        if delta is not None:
            wide += tl.load(delta + row * K + column, mask=inside, other=0.0).to(tl.float32)
            # The residual stream is rounded to its dtype before the norm, as separate kernels would leave it.
            narrow = wide.to(x.dtype.element_ty)
            tl.store(total + row * K + column, narrow, mask=inside & (tl.program_id(0) == 0))
            wide = narrow.to(tl.float32)
    return wide


@triton.jit
def _finish(
    result, up, square, eps, residual, out, row, output, rows,
    N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Norm the sums, gate or add, and store: result, up [T, N] and square [T, 1]."""
    if eps is not None:
        # A row's scale is the same for all of its products: taken out of the sum, x is read once, not twice.
        scale = tl.rsqrt(square / K + eps)
        result *= scale
        up *= scale
    if GATED:
        result = result / (1.0 + tl.exp(-result)) * up
    inside = (row < rows) & (output < N)
    if residual is not None:
        result += tl.load(residual + row * N + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + output, result.to(out.dtype.element_ty), mask=inside)
