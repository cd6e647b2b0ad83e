"""Sigmoid gate of an attention's output or of a shared expert."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attn_backends.kernels.linear.batch_invariance import by_row
from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton

_BLOCK = 1024


class SigmoidGate(NamedTuple):
    """x * sigmoid(gate), computed in fp32 and rounded once; [T, N] of x's dtype.

    - x     [T, N], rows of any stride
    - gate  [T, N], or [T, 1] for one gate a row; rows of any stride
    """

    x: torch.Tensor
    gate: torch.Tensor

    def reference(self) -> torch.Tensor:
        return by_row(self._gated, self.x, self.gate)

    def _gated(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return (x.float() * gate.float().sigmoid()).to(x.dtype)

    def fake(self) -> torch.Tensor:
        return self.x.new_empty(self.x.shape)

    def launch(self) -> torch.Tensor:
        out = self.fake()
        tokens, width = self.x.shape
        _sigmoid_gate_kernel[(tokens, cdiv(width, _BLOCK))](
            x_ptr=self.x,
            gate_ptr=self.gate,
            y_ptr=out,
            n_cols=width,
            stride_x=self.x.stride(0),
            stride_gate=self.gate.stride(0),
            GATE_PER_ROW=self.gate.shape[1] == 1,
            BLOCK_SIZE=_BLOCK,
            **dependent_launch(out.device),
        )
        return out


@triton.jit
def _sigmoid_gate_kernel(
    x_ptr,  # [T, N]
    gate_ptr,  # [T, N], or [T, 1]
    y_ptr,  # out: [T, N]
    n_cols,  # N
    stride_x,
    stride_gate,
    GATE_PER_ROW: tl.constexpr,  # one gate per row
    BLOCK_SIZE: tl.constexpr,  # columns per program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """y = x * sigmoid(gate). Grid [T, ceil(N / BLOCK_SIZE)]."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offs < n_cols
    x = tl.load(x_ptr + token * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    gate_offs = offs * 0 if GATE_PER_ROW else offs
    gate = tl.load(gate_ptr + token * stride_gate + gate_offs, mask=mask, other=0.0).to(tl.float32)
    y = x / (1.0 + tl.exp(-gate))
    tl.store(y_ptr + token * n_cols + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


sigmoid_gate = define_op("spec_decode::sigmoid_gate", SigmoidGate)
