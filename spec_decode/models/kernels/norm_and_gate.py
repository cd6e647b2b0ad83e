"""RMS norm of each head, and its gate."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton

_HEADS = 8
"""Heads per program. With one, a prompt's programs would be so many that starting them takes longer than the work."""


class NormAndGate(NamedTuple):
    """The arguments of `norm_and_gate`, which returns x / rms(x) * weight * silu(gate) of each head, computed in fp32
    and rounded once; [T, h D] of x's dtype.

    - x       [T, h, D], contiguous
    - gate    [T, h D], rows of any stride
    - weight  [D]
    """

    x: torch.Tensor
    gate: torch.Tensor
    weight: torch.Tensor
    eps: float

    def reference(self) -> torch.Tensor:
        normed = F.rms_norm(self.x.float(), self.weight.shape, self.weight.float(), self.eps).flatten(1)
        return (normed * F.silu(self.gate.float())).to(self.x.dtype)

    def fake(self) -> torch.Tensor:
        return self.x.new_empty(len(self.x), self.x.shape[1] * self.x.shape[2])

    def launch(self) -> torch.Tensor:
        out = self.fake()
        tokens, heads, dim = self.x.shape
        _norm_and_gate_kernel[(tokens, cdiv(heads, _HEADS))](
            x_ptr=self.x,
            gate_ptr=self.gate,
            w_ptr=self.weight,
            y_ptr=out,
            heads=heads,
            dim=dim,
            stride_gate=self.gate.stride(0),
            eps=self.eps,
            BLOCK_H=_HEADS,
            BLOCK_SIZE=next_power_of_2(dim),
            num_warps=4,
            **dependent_launch(out.device),
        )
        return out


@triton.jit
def _norm_and_gate_kernel(
    x_ptr,  # [T, h, D]
    gate_ptr,  # [T, h D]
    w_ptr,  # [D]
    y_ptr,  # out: [T, h D]
    heads,  # h
    dim,  # D
    stride_gate,  # between rows
    eps,
    BLOCK_H: tl.constexpr,  # heads per program
    BLOCK_SIZE: tl.constexpr,  # D, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """One program per token and BLOCK_H heads; grid [T, ceil(h / BLOCK_H)]."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    offs = tl.arange(0, BLOCK_SIZE)[None, :]
    at, mask = head * dim + offs, (head < heads) & (offs < dim)
    row = token * (heads * dim)
    x = tl.load(x_ptr + row + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * stride_gate + at, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + offs, mask=offs < dim, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 1) / dim + eps)[:, None] * w
    y = normed * gate / (1.0 + tl.exp(-gate))
    tl.store(y_ptr + row + at, y.to(y_ptr.dtype.element_ty), mask=mask)


norm_and_gate = define_op("spec_decode::norm_and_gate", NormAndGate)
