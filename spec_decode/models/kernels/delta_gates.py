"""The gates of a gated delta rule: how much of the state a token keeps, and how much of its value it writes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from builders.kernels.op import define_op
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


class DeltaGates(NamedTuple):
    """The arguments of `delta_gates`, which returns the log decay and beta of each value head, both fp32 [T, HV]:
    -exp(a_log) softplus(step + dt_bias) and sigmoid(write).

    - projected  [T, 2 HV], writes before steps; rows of any stride
    - a_log      fp32 [HV]
    - dt_bias    fp32 [HV]
    """

    projected: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        write, step = self.projected.float().chunk(2, 1)
        return -self.a_log.exp() * F.softplus(step + self.dt_bias), write.sigmoid()

    def fake(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape = len(self.projected), len(self.a_log)
        return (
            self.projected.new_empty(shape, dtype=torch.float32),
            self.projected.new_empty(shape, dtype=torch.float32),
        )

    def launch(self) -> tuple[torch.Tensor, torch.Tensor]:
        decay, beta = self.fake()
        heads = len(self.a_log)
        _delta_gates_kernel[(len(self.projected),)](
            projected_ptr=self.projected,
            a_log_ptr=self.a_log,
            dt_bias_ptr=self.dt_bias,
            decay_ptr=decay,
            beta_ptr=beta,
            heads=heads,
            stride=self.projected.stride(0),
            BLOCK_SIZE=next_power_of_2(heads),
            num_warps=1,
            **dependent_launch(decay.device),
        )
        return decay, beta


@triton.jit
def _delta_gates_kernel(
    projected_ptr,  # [T, 2 HV]
    a_log_ptr,  # fp32 [HV]
    dt_bias_ptr,  # fp32 [HV]
    decay_ptr,  # out: fp32 [T, HV]
    beta_ptr,  # out: fp32 [T, HV]
    heads,  # HV
    stride,  # between rows of projected
    BLOCK_SIZE: tl.constexpr,  # HV, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """One program per token."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_SIZE)
    mask = offs < heads
    write = tl.load(projected_ptr + token * stride + offs, mask=mask, other=0.0).to(tl.float32)
    step = tl.load(projected_ptr + token * stride + heads + offs, mask=mask, other=0.0).to(tl.float32)
    step += tl.load(dt_bias_ptr + offs, mask=mask, other=0.0)
    # log(1 + y) of a small y keeps y's bits: the rounding of 1 + y is divided out again. Decays add up over a text.
    y = tl.exp(tl.minimum(step, 20.0))
    rounded = 1.0 + y
    log1p = tl.where(rounded == 1.0, y, tl.log(rounded) * (y / (rounded - 1.0)))
    softplus = tl.where(step > 20.0, step, log1p)
    decay = -tl.exp(tl.load(a_log_ptr + offs, mask=mask, other=0.0)) * softplus
    tl.store(decay_ptr + token * heads + offs, decay, mask=mask)
    tl.store(beta_ptr + token * heads + offs, 1.0 / (1.0 + tl.exp(-write)), mask=mask)


delta_gates = define_op("spec_decode::delta_gates", DeltaGates)
