"""The kernel of streamed_linear whose tiles the bulk copy engine (TMA) fetches, and what its other kernel shares with
it; streamed_linear.py holds their contract.

One thread asks for a whole tile and the engine computes the addresses. With many rows the threads of streamed_kernel
spend most of their time on that. Legend: T rows, N outputs, K inputs of a row.
"""

from __future__ import annotations

from typing import Any

import torch

from builders.kernels.triton_runtime import HAVE_TRITON, await_previous, tl, triton

if HAVE_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

_ALIGNMENT = 16


def is_describable(matrix: torch.Tensor) -> bool:
    """Whether the engine can fetch tiles of a matrix [rows, columns] whose columns are adjacent: the matrix and each of
    its rows start at a multiple of 16 bytes, and no two rows overlap."""
    stride = matrix.stride(0)
    aligned = matrix.data_ptr() % _ALIGNMENT == 0 and stride * matrix.element_size() % _ALIGNMENT == 0
    return aligned and stride >= matrix.shape[1]


def describe(matrix: torch.Tensor, rows: int, columns: int) -> Any:
    """A descriptor by which the engine fetches tiles of rows x columns; what lies outside the matrix it reads as 0."""
    return TensorDescriptor(matrix, matrix.shape, matrix.stride(), [rows, columns])


@triton.jit
def streamed_tma_kernel(
    x_tiles,  # descriptor of x [T, K], tiles [BLOCK_T, BLOCK_K]
    more_x_tiles,  # the same with tiles [BLOCK_MORE, BLOCK_K]; not read without BLOCK_MORE
    weight_tiles,  # descriptor of the weight [N, K], tiles [HEIGHT, BLOCK_K]; with a gate [2 N, K]
    weight,  # where the weight starts
    bias,  # [N], or None
    residual,  # [T, N], or None
    out,  # out: [T, N]; SPLIT: fp32 [shares, T, N]
    rows,  # T
    share,  # inputs of a program, a multiple of BLOCK_K
    limit,  # of gate and up, or None
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_MORE: tl.constexpr,  # rows after the first BLOCK_T, or 0
    HEIGHT: tl.constexpr,  # outputs of a program
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    FP32_DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """HEIGHT outputs of every row, over one share of K. Its grid is [tiles of outputs, shares]."""
    # The outputs and the share of this program; its first tiles of the weight are asked for at once
    first = tl.program_id(0) * HEIGHT
    begin = tl.program_id(1) * share
    output = first + tl.arange(0, HEIGHT)
    ask_for_weight(weight, output, begin, N, K, BLOCK_K, PDL)
    if GATED:
        ask_for_weight(weight, N + output, begin, 2 * N, K, BLOCK_K, PDL)
    await_previous(PDL)

    # The products, BLOCK_K inputs at a time, with one tile of rows or two
    acc = tl.zeros((HEIGHT, BLOCK_T), tl.float32)
    up = acc
    if BLOCK_MORE:
        more_acc = tl.zeros((HEIGHT, BLOCK_MORE), tl.float32)
        more_up = more_acc
    for start in tl.range(begin, tl.minimum(begin + share, K), BLOCK_K, num_stages=STAGES):
        a = _tile(weight_tiles, first, start, FP32_DOT)
        b = tl.trans(_tile(x_tiles, 0, start, FP32_DOT))
        acc = tl.dot(a, b, acc, input_precision="ieee")
        if BLOCK_MORE:
            more_b = tl.trans(_tile(more_x_tiles, BLOCK_T, start, FP32_DOT))
            more_acc = tl.dot(a, more_b, more_acc, input_precision="ieee")
        if GATED:
            a = _tile(weight_tiles, N + first, start, FP32_DOT)
            up = tl.dot(a, b, up, input_precision="ieee")
            if BLOCK_MORE:
                more_up = tl.dot(a, more_b, more_up, input_precision="ieee")

    # What comes after the product, and the store
    row = tl.arange(0, BLOCK_T)
    _store(acc, up, row, bias, residual, out, rows, limit, output, N, GATED, SPLIT)
    if BLOCK_MORE:
        more_row = BLOCK_T + tl.arange(0, BLOCK_MORE)
        _store(more_acc, more_up, more_row, bias, residual, out, rows, limit, output, N, GATED, SPLIT)


@triton.jit
def _tile(tiles, row, column, FP32_DOT: tl.constexpr):
    tile = tiles.load([row, column])
    if FP32_DOT:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _store(
    acc,  # fp32 [HEIGHT, BLOCK_T]
    up,  # with a gate the same of the up projection
    row,  # [BLOCK_T]
    bias,  # [N], or None
    residual,  # [T, N], or None
    out,  # out: [T, N]; SPLIT: fp32 [shares, T, N]
    rows,  # T
    limit,  # of gate and up, or None
    output,  # [HEIGHT]
    N: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The sums of one share as they are, or whole products with what comes after them."""
    row, output = row.to(tl.int64)[:, None], output[None, :]
    inside = (row < rows) & (output < N)
    if SPLIT:
        tl.store(out + (tl.program_id(1) * rows + row) * N + output, tl.trans(acc), mask=inside)
    else:
        finish(tl.trans(acc), tl.trans(up), bias, residual, out, row, output, inside, limit, N, GATED)


@triton.jit
def ask_for_weight(
    weight,  # [height, K]
    row,  # of the weight, any number; what lies outside of it is cut to its last row
    begin,
    height,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Bring a program's first tile of the weight, BLOCK_K inputs from `begin` on, into the L2 cache.

    It may run before await_previous: it reads no value, and memory is idle while a program waits.
    """
    if PDL:
        LINE: tl.constexpr = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)
        LINES: tl.constexpr = BLOCK_K // LINE if BLOCK_K > LINE else 1
        column = tl.minimum(begin + tl.arange(0, LINES) * LINE, K - 1)
        line = weight + tl.minimum(row, height - 1).to(tl.int64)[:, None] * K + column[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line.to(tl.int64)], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def finish(
    result,  # fp32, of shape `inside`; with a gate the gate's
    up,  # with a gate the same of the up projection
    bias,  # [N], or None
    residual,  # [T, N], or None
    out,  # out: [T, N]
    row,  # int64, broadcasts to `inside`
    output,  # broadcasts to `inside`
    inside,  # bool
    limit,  # of gate and up, or None
    N: tl.constexpr,
    GATED: tl.constexpr,
):
    """Gate, add and store."""
    if bias is not None:
        result += tl.load(bias + output, mask=output < N, other=0.0).to(tl.float32)
    if GATED:
        if limit is not None:
            # Comparisons and not minima, which would make a number of NaN.
            result = tl.where(result > limit, limit, result)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        result = result / (1.0 + tl.exp(-result)) * up
    if residual is not None:
        result += tl.load(residual + row * N + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + output, result.to(out.dtype.element_ty), mask=inside)
