"""Batch-invariant products: one kernel, tiled only by the weights' sizes, so a row has the same bits in every batch.

Legend: M rows, B weights, N outputs, K inputs. Sums are in fp32 and rounded once: to the weight's dtype, or to x's if
the weight is in 8 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from attn_backends.kernels.linear.fp8_weight import Weight, is_scaled, operands, widened
from builders.devices import Room, room_of
from builders.errors import require
from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, stored_as, tl, triton


def batch_invariant_linear(x: torch.Tensor, weight: Weight, ends: torch.Tensor | None = None) -> torch.Tensor:
    """Return x[m, b] @ weight[b].T for each m and b; [M, B, N].

    x       [M, B, K], of any strides; the kernel converts it to the weight's dtype, or an 8-bit weight to x's
    weight  [B, N, K], of any strides
    ends    int32 [B]: x is [M, 1, K], sorted by weight, and ends[b] is one past the last row of weight b; rows from
            ends[-1] on use the last weight; the result is [M, 1, N]

    Raises BatchError for sizes that do not fit, before any launch.
    """
    values, scale = operands(weight)
    stacked = weight.shape[0] if ends is None else 1
    fits = x.dim() == len(weight.shape) == 3 and x.shape[1:] == (stacked, weight.shape[2])
    fits = fits and is_scaled(values, scale)
    require(
        fits and (ends is None or (ends.shape == weight.shape[:1] and ends.dtype == torch.int32)),
        "weights [B, N, K] multiply x [M, B, K], or sorted rows [M, 1, K] with int32 ends [B], got weights "
        f"{list(weight.shape)}, x {list(x.shape)} and ends {None if ends is None else list(ends.shape)}. "
        "Reshape them.",
    )
    return _batch_invariant_linear(x, values, ends, scale)


class BatchInvariantLinear(NamedTuple):
    """The arguments of `batch_invariant_linear`. scale: fp32 [B, N] for a weight in float8_e4m3fn, else None."""

    x: torch.Tensor
    weight: torch.Tensor
    ends: torch.Tensor | None
    scale: torch.Tensor | None = None

    def reference(self) -> torch.Tensor:
        """Multiply each row separately, from a copy: torch's sums depend on the number of rows and on alignment."""
        out, weight, ends = self.fake(), widened(self.weight, self.scale), self.ends
        for t, row in enumerate(self.x.float()):
            used = weight if ends is None else weight[int((ends[:-1] <= t).sum())][None]
            for b, (inputs, matrix) in enumerate(zip(row, used, strict=True)):
                aligned = inputs.clone(memory_format=torch.contiguous_format)
                out[t, b] = F.linear(aligned[None], matrix)[0].to(out.dtype)
        return out

    def fake(self) -> torch.Tensor:
        dtype = self.weight.dtype if self.scale is None else self.x.dtype
        return self.x.new_empty(*self.x.shape[:2], self.weight.shape[1], dtype=dtype)

    def launch(self) -> torch.Tensor:
        (rows, stacked, inputs), outputs = self.x.shape, self.weight.shape[1]
        out = self.fake()
        stored = stored_as(out)
        tile = tile_of(outputs, self.weight.element_size(), room_of(out.device))
        tiles = rows if self.ends is not None else cdiv(rows, tile["BLOCK_M"])
        if rows and stacked:
            batch_invariant_linear_kernel[(tiles, cdiv(outputs, tile["BLOCK_N"]), stacked)](
                x_ptr=self.x,
                w_ptr=self.weight,
                scale_ptr=self.scale,
                ends_ptr=self.ends,
                y_ptr=stored,
                M=rows,
                stride_xm=self.x.stride(0),
                stride_xb=self.x.stride(1),
                stride_xk=self.x.stride(2),
                stride_wb=self.weight.stride(0),
                stride_wn=self.weight.stride(1),
                stride_wk=self.weight.stride(2),
                stride_ym=stored.stride(0),
                stride_yb=stored.stride(1),
                N=outputs,
                K=inputs,
                WEIGHTS=self.weight.shape[0],
                BLOCK_E=next_power_of_2(self.weight.shape[0]),
                FP32_DOT=stored.device.type == "cpu",
                **tile,
                **dependent_launch(out.device),
            )
        return stored.to(out.dtype)


def tile_of(outputs: int, itemsize: int, room: Room) -> dict[str, int]:
    """Return a program's rows, outputs and block of inputs, chosen only by the weight's sizes and the device.

    The best compromise for 1 to 512 rows among those tried on an H200. A narrow weight gets fewer outputs per program,
    so more programs read it.
    """
    if itemsize == 4:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3}
    block_m, block_n, block_k, warps, stages = (
        (128, 128, 64, 8, 3) if outputs > 8192 else (64, 64, 128, 4, 3) if outputs > 2048 else (64, 32, 128, 4, 4)
    )
    stages = min(stages, room.shared_memory // ((block_m + block_n) * block_k * 2))
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": warps, "num_stages": stages}


@triton.jit
def batch_invariant_linear_kernel(
    x_ptr,  # [M, B, K]; with ends [M, 1, K]
    w_ptr,  # [B, N, K]
    scale_ptr,  # fp32 [B, N], of w; or None
    ends_ptr,  # int32 [B], one past each weight's last row, or None
    y_ptr,  # out: [M, B, N]; with ends [M, 1, N]
    M,  # M
    stride_xm,
    stride_xb,
    stride_xk,
    stride_wb,
    stride_wn,
    stride_wk,
    stride_ym,
    stride_yb,
    N: tl.constexpr,
    K: tl.constexpr,
    WEIGHTS: tl.constexpr,  # B
    BLOCK_E: tl.constexpr,  # B, rounded up to a power of two
    BLOCK_M: tl.constexpr,  # rows of a tile
    BLOCK_N: tl.constexpr,  # outputs of a tile
    BLOCK_K: tl.constexpr,  # inputs per iteration
    FP32_DOT: tl.constexpr,  # multiply in fp32, for the interpreter
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """y[:, b] = x[:, b] @ w[b]^T * scale[b]. A program has a tile [BLOCK_M, BLOCK_N] of y, over all of K in order.

    Grid [tiles of rows, tiles of outputs, B]; with ends_ptr [M, tiles of outputs, 1], and one row per tile.
    """
    INT32_MAX: tl.constexpr = 2**31 - 1
    await_previous(PDL)
    # 1. The rows of this program, and the weight that multiplies them
    pid_b = tl.program_id(2).to(tl.int64)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    w_index = pid_b
    mask_m = offs_m < M
    if ends_ptr is not None:
        # The same tile with one used row, so a row has the same bits as without groups.
        offs_m = tl.program_id(0) + tl.arange(0, BLOCK_M)
        mask_m = tl.arange(0, BLOCK_M) == 0
        offs_e = tl.arange(0, BLOCK_E)
        ends = tl.load(ends_ptr + offs_e, mask=offs_e < WEIGHTS - 1, other=INT32_MAX)
        w_index = tl.sum((ends <= tl.program_id(0)).to(tl.int32), 0).to(tl.int64)
    offs_m = offs_m.to(tl.int64)[:, None]
    offs_n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
    x_ptrs = x_ptr + (pid_b * stride_xb + offs_m * stride_xm)
    w_ptrs = w_ptr + (w_index * stride_wb + offs_n * stride_wn)
    # 2. x @ w^T, in blocks of BLOCK_K inputs
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        mask_x = mask_m[:, None] & (offs_k < K)[None, :]
        mask_w = (offs_k < K)[:, None] & (offs_n < N)
        x = tl.load(x_ptrs + offs_k[None, :] * stride_xk, mask=mask_x, other=0.0)
        w = tl.load(w_ptrs + offs_k[:, None] * stride_wk, mask=mask_w, other=0.0)
        if scale_ptr is None:
            x = x.to(w_ptr.dtype.element_ty)
        else:
            w = w.to(tl.float32).to(x_ptr.dtype.element_ty)
        if FP32_DOT:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    # 3. The scale, and the store
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr + w_index * N + offs_n, mask=offs_n < N, other=0.0)
    y_ptrs = y_ptr + offs_m * stride_ym + pid_b * stride_yb + offs_n
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask_m[:, None] & (offs_n < N))


_batch_invariant_linear = define_op("attn_backends::batch_invariant_linear", BatchInvariantLinear)
