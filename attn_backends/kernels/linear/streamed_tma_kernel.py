"""The kernel of streamed_linear that loads tiles with the bulk copy engine (TMA), and the parts that it shares with the
other kernel; streamed_linear.py documents their contract.

One thread requests a whole tile and the engine computes the addresses. With many rows, the threads of streamed_kernel
spend most of their time on that. Legend: M rows, N outputs, K inputs of a row.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_backends.kernels.linear.swiglu import activate
from builders.kernels.triton_runtime import HAVE_TRITON, await_previous, tl, triton

if HAVE_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

_ALIGNMENT = 16


def is_describable(matrix: torch.Tensor) -> bool:
    """Whether the engine can fetch tiles of a matrix [rows, columns] with contiguous columns: the matrix and each of
    its rows start at a multiple of 16 bytes, and rows do not overlap."""
    stride = matrix.stride(0)
    aligned = matrix.data_ptr() % _ALIGNMENT == 0 and stride * matrix.element_size() % _ALIGNMENT == 0
    return aligned and stride >= matrix.shape[1]


def describe(matrix: torch.Tensor, rows: int, columns: int) -> Any:
    """Return a descriptor for tiles of rows x columns; elements outside the matrix are read as 0."""
    return TensorDescriptor(matrix, matrix.shape, matrix.stride(), [rows, columns])


@triton.jit(do_not_specialize=["M"])
def streamed_tma_kernel(
    x_desc,  # descriptor of x [M, K], tiles [BLOCK_M, BLOCK_K]
    x2_desc,  # the same with tiles [BLOCK_M2, BLOCK_K]; unused without BLOCK_M2
    w_desc,  # descriptor of the weight [N, K], tiles [TILE_N, BLOCK_K]; with a gate [2 N, K]
    w_ptr,  # start of the weight
    scale_ptr,  # fp32 [N], of the weight, with a gate [2 N]; or None
    x_scale_ptr,  # fp32 [M], of x; None if scale_ptr is
    bias_ptr,  # [N], or None
    residual_ptr,  # [M, N], or None
    y_ptr,  # out: [M, N]; SPLIT_K: fp32 [shares, M, N]
    M,
    k_per_share,  # inputs per program, a multiple of BLOCK_K
    limit,  # upper bound of the gate, and of up's absolute value; or None
    N: tl.constexpr,  # SPLIT_K: all rows of the weight
    K: tl.constexpr,
    GATED: tl.constexpr,  # the weight is gate above up; never with SPLIT_K
    SPLIT_K: tl.constexpr,  # store a share's partial sums, for sum_shares_kernel
    BLOCK_M: tl.constexpr,  # rows of the first tile
    BLOCK_M2: tl.constexpr,  # rows of the second tile, or 0
    TILE_N: tl.constexpr,  # outputs per program
    BLOCK_K: tl.constexpr,  # inputs per iteration
    STAGES: tl.constexpr,  # tiles in flight
    FP32_DOT: tl.constexpr,  # multiply in fp32, for the interpreter
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """y = epilogue(x @ w^T * scales). A program has TILE_N outputs of every row, and one share of K; grid
    [tiles, shares].

    Operands in 8 bits have scales, both of them.
    """
    # 1. The outputs and the share of this program; its first tiles of the weight are prefetched at once
    n_start = tl.program_id(0) * TILE_N
    k_start = tl.program_id(1) * k_per_share
    offs_n = n_start + tl.arange(0, TILE_N)
    prefetch_weight(w_ptr, offs_n, k_start, N, K, BLOCK_K, PDL)
    if GATED:
        prefetch_weight(w_ptr, N + offs_n, k_start, 2 * N, K, BLOCK_K, PDL)
    await_previous(PDL)

    # 2. w @ x^T, in blocks of BLOCK_K inputs, with one or two tiles of rows
    acc = tl.zeros((TILE_N, BLOCK_M), tl.float32)
    up = acc
    if BLOCK_M2:
        acc2 = tl.zeros((TILE_N, BLOCK_M2), tl.float32)
        up2 = acc2
    for k in tl.range(k_start, tl.minimum(k_start + k_per_share, K), BLOCK_K, num_stages=STAGES):
        w = _tile(w_desc, n_start, k, FP32_DOT)
        x = tl.trans(_tile(x_desc, 0, k, FP32_DOT))
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if BLOCK_M2:
            x2 = tl.trans(_tile(x2_desc, BLOCK_M, k, FP32_DOT))
            acc2 = tl.dot(w, x2, acc2, input_precision="ieee")
        if GATED:
            w = _tile(w_desc, N + n_start, k, FP32_DOT)
            up = tl.dot(w, x, up, input_precision="ieee")
            if BLOCK_M2:
                up2 = tl.dot(w, x2, up2, input_precision="ieee")

    # 3. The epilogue, and the store
    offs_m = tl.arange(0, BLOCK_M)
    _store(acc, up, offs_m, scale_ptr, x_scale_ptr, bias_ptr, residual_ptr, y_ptr, M, limit, offs_n, N, GATED, SPLIT_K)
    if BLOCK_M2:
        offs_m2 = BLOCK_M + tl.arange(0, BLOCK_M2)
        _store(
            acc2, up2, offs_m2, scale_ptr, x_scale_ptr, bias_ptr, residual_ptr, y_ptr, M, limit, offs_n, N, GATED,
            SPLIT_K,
        )  # fmt: skip


@triton.jit
def _tile(desc, row, column, FP32_DOT: tl.constexpr):
    """Load the tile that starts at this row and column."""
    tile = desc.load([row, column])
    if FP32_DOT:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _store(
    acc,  # fp32 [TILE_N, BLOCK_M]
    up,  # with a gate: the same for the up projection
    offs_m,  # [BLOCK_M]
    scale_ptr,  # fp32 [N], with a gate [2 N]; or None
    x_scale_ptr,  # fp32 [M], or None
    bias_ptr,  # [N], or None
    residual_ptr,  # [M, N], or None
    y_ptr,  # out: [M, N]; SPLIT_K: fp32 [shares, M, N]
    M,
    limit,  # upper bound of the gate, and of up's absolute value; or None
    offs_n,  # [TILE_N]
    N: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    """Store acc^T: a share's partial sums unchanged, or full sums after the epilogue."""
    offs_m, offs_n = offs_m.to(tl.int64)[:, None], offs_n[None, :]
    mask = (offs_m < M) & (offs_n < N)
    y, up = tl.trans(acc), tl.trans(up)
    if scale_ptr is not None:
        x_scale = tl.load(x_scale_ptr + offs_m, mask=offs_m < M, other=0.0)
        y = y * x_scale * tl.load(scale_ptr + offs_n, mask=offs_n < N, other=0.0)
        if GATED:
            up = up * x_scale * tl.load(scale_ptr + N + offs_n, mask=offs_n < N, other=0.0)
    if SPLIT_K:
        tl.store(y_ptr + (tl.program_id(1) * M + offs_m) * N + offs_n, y, mask=mask)
    else:
        epilogue(y, up, bias_ptr, residual_ptr, y_ptr, offs_m, offs_n, mask, limit, N, GATED)


@triton.jit
def prefetch_weight(
    w_ptr,  # [num_rows, K]
    w_rows,  # rows of the weight, any number; clamped to its last row
    k_start,
    num_rows,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Prefetch a program's first tile of the weight, BLOCK_K inputs from k_start on, into the L2 cache.

    Can run before await_previous: it reads no values, and memory is idle while a program waits.
    """
    if PDL:
        L2_LINE_BYTES: tl.constexpr = 128
        LINE_ELEMENTS: tl.constexpr = L2_LINE_BYTES // (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
        NUM_LINES: tl.constexpr = BLOCK_K // LINE_ELEMENTS if BLOCK_K > LINE_ELEMENTS else 1
        offs_k = tl.minimum(k_start + tl.arange(0, NUM_LINES) * LINE_ELEMENTS, K - 1)
        line_ptrs = w_ptr + tl.minimum(w_rows, num_rows - 1).to(tl.int64)[:, None] * K + offs_k[None, :]
        # Inline assembly must have a result: the mov produces an unused one.
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line_ptrs.to(tl.int64)], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def epilogue(
    y,  # fp32, with the shape of `mask`; with a gate: the gate's
    up,  # with a gate: the same for the up projection
    bias_ptr,  # [N], with a gate [2 N]; or None
    residual_ptr,  # [M, N], or None
    y_ptr,  # out: [M, N]
    offs_m,  # int64, broadcasts to `mask`
    offs_n,  # broadcasts to `mask`
    mask,  # bool
    limit,  # upper bound of the gate, and of up's absolute value; or None
    N: tl.constexpr,
    GATED: tl.constexpr,
    alpha=None,  # see `activate`
):
    """Store y + bias, with a gate activate(y + bias, up + bias), plus the residual if there is one."""
    if bias_ptr is not None:
        y += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    if GATED:
        if bias_ptr is not None:
            up += tl.load(bias_ptr + N + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
        y = activate(y, up, limit, alpha)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + offs_m * N + offs_n, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs_m * N + offs_n, y.to(y_ptr.dtype.element_ty), mask=mask)
