"""Rounding rows to 8 bits, each with a scale of its own, as each output of an 8-bit weight has one.

Legend: M rows, K inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from attn_backends.kernels.linear.fp8_weight import DTYPE
from builders.kernels.op import define_op
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, stored_as, tl, triton

_LARGEST, _LEAST = torch.finfo(DTYPE).max, torch.finfo(torch.float32).tiny


def narrow_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x [M, K] to float8_e4m3fn [M, K] times a scale for each row, fp32 [M], which maps the row's largest
    magnitude to the largest 8-bit value. A row with NaN or infinity has NaN."""
    return _narrow_rows(x)


class NarrowRows(NamedTuple):
    """The argument of `narrow_rows`."""

    x: torch.Tensor

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x.float()
        scale = (x.abs().amax(-1) / _LARGEST).clamp(min=_LEAST)
        return (x / scale[:, None]).to(DTYPE), scale

    def fake(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x
        values = torch.empty_like(x, dtype=DTYPE, memory_format=torch.contiguous_format)
        return values, x.new_empty(x.shape[0], dtype=torch.float32)

    def launch(self) -> tuple[torch.Tensor, torch.Tensor]:
        (rows, inputs), (values, scale) = self.x.shape, self.fake()
        stored, block = stored_as(values), next_power_of_2(inputs)
        if rows:
            narrow_rows_kernel[(rows,)](
                x_ptr=self.x,
                y_ptr=stored,
                scale_ptr=scale,
                stride_xm=self.x.stride(0),
                stride_xk=self.x.stride(1),
                K=inputs,
                LARGEST=_LARGEST,
                LEAST=_LEAST,
                BLOCK_K=block,
                num_warps=max(4, min(16, block // 1024)),
                **dependent_launch(self.x.device),
            )
        return values if stored is values else stored.to(DTYPE), scale


@triton.jit
def narrow_rows_kernel(
    x_ptr,  # [M, K]
    y_ptr,  # out: [M, K], contiguous
    scale_ptr,  # out: fp32 [M]
    stride_xm,
    stride_xk,
    K: tl.constexpr,
    LARGEST: tl.constexpr,  # the largest 8-bit value
    LEAST: tl.constexpr,  # of a scale, so that a row of zeros is not divided by 0
    BLOCK_K: tl.constexpr,  # K, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """y * scale = x, with one scale for each row. Grid [M]."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + row * stride_xm + offs * stride_xk, mask=offs < K, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0) / LARGEST, LEAST)
    tl.store(scale_ptr + row, scale)
    tl.store(y_ptr + row * K + offs, (x / scale).to(y_ptr.dtype.element_ty), mask=offs < K)


_narrow_rows = define_op("attn_backends::narrow_rows", NarrowRows)
