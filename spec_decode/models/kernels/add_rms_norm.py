"""A norm, and the residual addition before it, as one kernel."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from builders.kernels.op_by_schema import define_op_by_schema
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum = x + delta (x itself where there is none), and sum / rms(sum) * weight computed in fp32.

    x [..., H], delta as x and contiguous, weight [H].
    """
    if x.requires_grad or weight.requires_grad or (delta is not None and delta.requires_grad):
        total, normed = _formula(x, delta, weight, eps)
    else:
        total, normed = _add_rms_norm_op(x, delta, weight, eps)
    return (x if delta is None else total), normed


def _formula(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + delta (empty where there is no delta), and the norm."""
    total = x.new_empty(0) if delta is None else x + delta
    return total, F.rms_norm(x if delta is None else total, weight.shape, weight, eps)


def _launch(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total, normed = _fake(x, delta, weight, eps)
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    block = triton.next_power_of_2(width)
    _add_rms_norm_kernel[(rows.shape[0],)](
        rows,
        delta,
        weight,
        total,
        normed,
        width,
        rows.stride(0),
        eps,
        BLOCK=block,
        num_warps=1 if block <= 256 else 4 if block <= 2048 else 8,
        **dependent_launch(x.device),
    )
    return total, normed


def _fake(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(0 if delta is None else x.shape), x.new_empty(x.shape)


@triton.jit
def _add_rms_norm_kernel(
    x, delta, weight, total, normed, width, stride, eps, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    row = tl.load(x + token * stride + column, mask=inside, other=0.0)
    if delta is not None:
        # The residual stream is rounded to its dtype before the norm, as separate kernels would leave it.
        row = (row + tl.load(delta + token * width + column, mask=inside, other=0.0)).to(x.dtype.element_ty)
        tl.store(total + token * width + column, row, mask=inside)
    wide = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + token * width + column, (wide * scale * factor).to(normed.dtype.element_ty), mask=inside)


_add_rms_norm_op = define_op_by_schema(
    "spec_decode::add_rms_norm",
    "(Tensor x, Tensor? delta, Tensor weight, float eps) -> (Tensor, Tensor)",
    cpu=_formula,
    cuda=_launch,
    fake=_fake,
)
