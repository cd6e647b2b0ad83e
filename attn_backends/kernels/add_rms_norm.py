"""Fused residual addition and RMS norm."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from builders.kernels.op import define_op
from builders.kernels.rows import whole_rows
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + delta (x itself if delta is None), and sum / rms(sum) * weight, computed in fp32.

    x       float [..., H]
    delta   contiguous, with x's shape and dtype; or fp32 [S, T, H], contiguous, to sum over S, for x [T, H]; or None
    weight  float [H], of any dtype

    Both results have the shape and dtype of x.
    """
    if x.requires_grad or weight.requires_grad or (delta is not None and delta.requires_grad):
        total, normed = AddRmsNorm(x, delta, weight, eps).reference()
    else:
        total, normed = _add_rms_norm(x, delta, weight, eps)
    return (x if delta is None else total), normed


class AddRmsNorm(NamedTuple):
    """The arguments of `add_rms_norm`. Without a delta the first result is empty: an op cannot return its input."""

    x: torch.Tensor
    delta: torch.Tensor | None
    weight: torch.Tensor
    eps: float

    @property
    def shares(self) -> int:
        """S; 0 for a delta with x's shape."""
        return len(self.delta) if self.delta is not None and self.delta.dim() > self.x.dim() else 0

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.x.new_empty(0) if self.delta is None else self.x + self.delta
        if self.shares:
            assert self.delta is not None, "only a delta has shares"
            total = (self.x.float() + self.delta.sum(0)).to(self.x.dtype)
        x = self.x if self.delta is None else total
        # The weight can be in fp32 with a narrower x.
        wide = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        return total, F.rms_norm(wide, self.weight.shape, self.weight.to(wide.dtype), self.eps).to(x.dtype)

    def fake(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x.new_empty(0 if self.delta is None else self.x.shape), self.x.new_empty(self.x.shape)

    def launch(self) -> tuple[torch.Tensor, torch.Tensor]:
        total, normed = self.fake()
        width = self.x.shape[-1]
        rows = whole_rows(self.x.reshape(-1, width))
        block = next_power_of_2(width)
        _add_rms_norm_kernel[(rows.shape[0],)](
            x_ptr=rows,
            delta_ptr=self.delta,
            w_ptr=self.weight,
            total_ptr=total,
            y_ptr=normed,
            n_cols=width,
            stride_x=rows.stride(0),
            eps=self.eps,
            SHARES=self.shares,
            BLOCK_SIZE=block,
            num_warps=1 if block <= 256 else 4 if block <= 2048 else 8,
            **dependent_launch(self.x.device),
        )
        return total, normed


@triton.jit
def _add_rms_norm_kernel(
    x_ptr,  # [T, H]
    delta_ptr,  # [T, H], with SHARES fp32 [S, T, H], or None
    w_ptr,  # [H]
    total_ptr,  # out: [T, H]; empty without a delta
    y_ptr,  # out: [T, H]
    n_cols,  # H
    stride_x,  # between rows of x
    eps,
    SHARES: tl.constexpr,  # S; 0 for a delta with x's shape
    BLOCK_SIZE: tl.constexpr,  # H, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """total = x + delta, y = total * rstd * w with rstd = 1 / sqrt(mean(total^2) + eps).

    One program per row; T covers all dims of x but the last.
    """
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_SIZE)
    mask = offs < n_cols
    # 1. The sum of x and delta
    x = tl.load(x_ptr + token * stride_x + offs, mask=mask, other=0.0)
    if delta_ptr is not None:
        # The residual stream is rounded to its dtype before the norm, as separate kernels would do.
        if SHARES == 0:
            delta = tl.load(delta_ptr + token * n_cols + offs, mask=mask, other=0.0)
        else:
            delta = tl.zeros((BLOCK_SIZE,), tl.float32)
            for share in tl.static_range(SHARES):
                share_ptrs = delta_ptr + (share * tl.num_programs(0) + token) * n_cols
                delta += tl.load(share_ptrs + offs, mask=mask, other=0.0)
        # Added in fp32 and rounded once, because the interpreter would add the bit patterns of bf16.
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(total_ptr + token * n_cols + offs, x, mask=mask)
    # 2. Its RMS norm
    x_fp32 = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x_fp32 * x_fp32, 0) / n_cols + eps)
    w = tl.load(w_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * n_cols + offs, (x_fp32 * rstd * w).to(y_ptr.dtype.element_ty), mask=mask)


_add_rms_norm = define_op("attn_backends::add_rms_norm", AddRmsNorm)
