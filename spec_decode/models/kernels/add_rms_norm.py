"""RMS norm and the residual addition before it, in one kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum x + delta (x itself where there is no delta), and sum / rms(sum) * weight, computed in fp32.

    x       float [..., H]
    delta   as x and contiguous; or fp32 [S, T, H] contiguous, whose sum over S it is, of x [T, H]; or None
    weight  float [H]

    Both results have the shape and dtype of x.
    """
    if x.requires_grad or weight.requires_grad or (delta is not None and delta.requires_grad):
        total, normed = AddRmsNorm(x, delta, weight, eps).reference()
    else:
        total, normed = _add_rms_norm(x, delta, weight, eps)
    return (x if delta is None else total), normed


class AddRmsNorm(NamedTuple):
    """As `add_rms_norm` has them. The first result is empty where there is no delta: an op may not return its input."""

    x: torch.Tensor
    delta: torch.Tensor | None
    weight: torch.Tensor
    eps: float

    @property
    def shares(self) -> int:
        """S; 0 for a delta as x."""
        return len(self.delta) if self.delta is not None and self.delta.dim() > self.x.dim() else 0

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.x.new_empty(0) if self.delta is None else self.x + self.delta
        if self.shares:
            assert self.delta is not None, "shares are of a delta"
            total = (self.x.float() + self.delta.sum(0)).to(self.x.dtype)
        x = self.x if self.delta is None else total
        return total, F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def fake(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x.new_empty(0 if self.delta is None else self.x.shape), self.x.new_empty(self.x.shape)

    def launch(self) -> tuple[torch.Tensor, torch.Tensor]:
        total, normed = self.fake()
        width = self.x.shape[-1]
        rows = self.x.reshape(-1, width)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        block = triton.next_power_of_2(width)
        _add_rms_norm_kernel[(rows.shape[0],)](
            rows,
            self.delta,
            self.weight,
            total,
            normed,
            width,
            rows.stride(0),
            self.eps,
            SHARES=self.shares,
            BLOCK=block,
            num_warps=1 if block <= 256 else 4 if block <= 2048 else 8,
            **dependent_launch(self.x.device),
        )
        return total, normed


@triton.jit
def _add_rms_norm_kernel(
    x,  # [T, H]
    delta,  # [T, H], with SHARES fp32 [S, T, H], or None
    weight,  # [H]
    total,  # out: [T, H]; empty without a delta
    normed,  # out: [T, H]
    width,  # H
    stride,  # of a row of x
    eps,
    SHARES: tl.constexpr,  # S; 0 for a delta as x
    BLOCK: tl.constexpr,  # H, rounded up to a power of two
    PDL: tl.constexpr,
):
    """One program per row, all dims of x but the last taken for T."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    # The sum of x and delta
    row = tl.load(x + token * stride + column, mask=inside, other=0.0)
    if delta is not None:
        # The residual stream is rounded to its dtype before the norm, as separate kernels would leave it.
        if SHARES == 0:
            added = tl.load(delta + token * width + column, mask=inside, other=0.0)
        else:
            added = tl.zeros((BLOCK,), tl.float32)
            for share in tl.static_range(SHARES):
                of_share = delta + (share * tl.num_programs(0) + token) * width
                added += tl.load(of_share + column, mask=inside, other=0.0)
        row = (row + added).to(x.dtype.element_ty)
        tl.store(total + token * width + column, row, mask=inside)
    # Its RMS norm
    wide = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + token * width + column, (wide * scale * factor).to(normed.dtype.element_ty), mask=inside)


_add_rms_norm = define_op("spec_decode::add_rms_norm", AddRmsNorm)
