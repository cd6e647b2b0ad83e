"""SwiGLU and GeGLU, the gated activations of a feed-forward block."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from attn_backends.kernels.linear.batch_invariance import by_row
from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton

_BLOCK = 1024


def swiglu(
    gate_up: torch.Tensor, limit: float | None = None, alpha: float | None = None, gelu: bool = False
) -> torch.Tensor:
    """Return silu(gate) * up, computed in fp32 and rounded once; [T, I].

    gate_up  float [T, 2 I], gate first
    limit    if given, gate is min(gate, limit) and up is clamp(up, -limit, limit)
    alpha    if given, the result is gate * sigmoid(alpha * gate) * (up + 1), as in GPT-OSS
    gelu     GeGLU: gelu(gate) instead of silu(gate), by the formula with tanh (Hendrycks and Gimpel, 2016)
    """
    arguments = SwiGLU(gate_up, limit, alpha, gelu)
    return arguments.reference() if gate_up.requires_grad else _swiglu(*arguments)


class SwiGLU(NamedTuple):
    """The arguments of `swiglu`."""

    gate_up: torch.Tensor
    limit: float | None
    alpha: float | None = None
    gelu: bool = False

    def reference(self) -> torch.Tensor:
        return by_row(lambda x: activated(x.float(), *self[1:]).to(x.dtype), self.gate_up)

    def fake(self) -> torch.Tensor:
        return self.gate_up.new_empty(self.gate_up.shape[0], self.gate_up.shape[1] // 2)

    def launch(self) -> torch.Tensor:
        out = self.fake()
        tokens, width = out.shape
        _swiglu_kernel[(tokens, cdiv(width, _BLOCK))](
            gate_up_ptr=self.gate_up,
            y_ptr=out,
            n_cols=width,
            stride_gate_up=self.gate_up.stride(0),
            limit=self.limit,
            alpha=self.alpha,
            GELU=self.gelu,
            BLOCK_SIZE=_BLOCK,
            **dependent_launch(out.device),
        )
        return out


def activated(
    gate_up: torch.Tensor, limit: float | None = None, alpha: float | None = None, gelu: bool = False
) -> torch.Tensor:
    """Compute `swiglu` in torch, without rounding."""
    gate, up = gate_up.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if gelu:
        return F.gelu(gate, approximate="tanh") * up
    return F.silu(gate) * up if alpha is None else gate * torch.sigmoid(alpha * gate) * (up + 1)


@triton.jit
def activate(
    gate,  # fp32
    up,  # fp32
    limit,  # upper bound of the gate, and of up's absolute value; or None
    alpha,  # see `swiglu`; or None
    GELU: tl.constexpr = False,  # see `swiglu`
):
    """Compute `activated` in a kernel."""
    if limit is not None:
        # Comparisons instead of minima, which would turn NaN into a number.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    exponent = gate
    if GELU:
        # gate (1 + tanh z) / 2 = gate / (1 + exp(-2 z)), with z = sqrt(2 / pi) (gate + 0.044715 gate^3)
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    if alpha is not None:
        exponent = alpha * gate
        up += 1.0
    return gate / (1.0 + tl.exp(-exponent)) * up


@triton.jit
def _swiglu_kernel(
    gate_up_ptr,  # [T, 2 I]
    y_ptr,  # out: [T, I]
    n_cols,  # I
    stride_gate_up,  # between rows of gate_up
    limit,  # see `activate`
    alpha,  # see `activate`
    GELU: tl.constexpr,  # see `activate`
    BLOCK_SIZE: tl.constexpr,  # columns per program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """y = activate(gate, up). Grid [T, ceil(I / BLOCK_SIZE)]."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offs < n_cols
    gate = tl.load(gate_up_ptr + token * stride_gate_up + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * stride_gate_up + n_cols + offs, mask=mask, other=0.0).to(tl.float32)
    y = activate(gate, up, limit, alpha, GELU)
    tl.store(y_ptr + token * n_cols + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


_swiglu = define_op("attn_backends::swiglu", SwiGLU)
