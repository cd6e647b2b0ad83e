"""The gated activation of a feed-forward block."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from builders.kernels.op_by_schema import define_op_by_schema
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton

_BLOCK = 1024


def swiglu(gate_up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """silu(gate) * up for gate_up [T, 2 * I], gate first; [T, I].

    With a limit, silu(min(gate, limit)) * clamp(up, -limit, limit). All of it in fp32, rounded once.
    """
    out: torch.Tensor = _formula(gate_up, limit) if gate_up.requires_grad else _swiglu_op(gate_up, limit)
    return out


def _formula(gate_up: torch.Tensor, limit: float | None) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (F.silu(gate) * up).to(gate_up.dtype)


def _launch(gate_up: torch.Tensor, limit: float | None) -> torch.Tensor:
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    _swiglu_kernel[(tokens, triton.cdiv(width, _BLOCK))](
        gate_up, out, width, gate_up.stride(0), limit, BLOCK=_BLOCK, **dependent_launch(gate_up.device)
    )
    return out


@triton.jit
def _swiglu_kernel(gate_up, out, width, stride, limit, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + token * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + width + column, mask=inside, other=0.0).to(tl.float32)
    if limit is not None:
        # Comparisons and not minima, which would make a number of NaN.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * width + column, result.to(out.dtype.element_ty), mask=inside)


_swiglu_op = define_op_by_schema(
    "spec_decode::swiglu",
    "(Tensor gate_up, float? limit) -> Tensor",
    cpu=_formula,
    cuda=_launch,
    fake=lambda gate_up, limit: gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2),
)
