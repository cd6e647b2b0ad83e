"""A residual addition and the norm behind it, as one kernel."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from builders._ops import define_op
from builders._triton import tl, triton


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum = x + delta, and sum / rms(sum) * weight computed in fp32; x and delta [T, H] contiguous, weight [H]."""
    if x.requires_grad or delta.requires_grad or weight.requires_grad:
        return _formula(x, delta, weight, eps)
    total, normed = _add_rms_norm_op(x, delta, weight, eps)
    return total, normed


def _formula(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + delta
    return total, F.rms_norm(total, weight.shape, weight, eps)


def _launch(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total, normed = torch.empty_like(x), torch.empty_like(x)
    tokens, width = x.shape
    block = triton.next_power_of_2(width)
    _add_rms_norm_kernel[(tokens,)](
        x, delta, weight, total, normed, width, eps, BLOCK=block, num_warps=4 if block <= 2048 else 8
    )
    return total, normed


@triton.jit
def _add_rms_norm_kernel(x, delta, weight, total, normed, width, eps, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    a = tl.load(x + token * width + column, mask=inside, other=0.0)
    b = tl.load(delta + token * width + column, mask=inside, other=0.0)
    # The residual stream is rounded to its dtype before the norm, as separate kernels would leave it.
    row = (a + b).to(x.dtype.element_ty)
    tl.store(total + token * width + column, row, mask=inside)
    wide = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + token * width + column, (wide * scale * factor).to(normed.dtype.element_ty), mask=inside)


_add_rms_norm_op = define_op(
    "spec_decode::add_rms_norm",
    "(Tensor x, Tensor delta, Tensor weight, float eps) -> (Tensor, Tensor)",
    cpu=_formula,
    cuda=_launch,
    fake=lambda x, delta, weight, eps: (torch.empty_like(x), torch.empty_like(x)),
)
