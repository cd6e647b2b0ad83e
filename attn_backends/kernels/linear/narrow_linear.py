"""Products of many rows with an 8-bit weight: the rows are rounded to 8 bits too, because tensor cores multiply 8 bits
twice as fast as 16, and no product that keeps 16-bit rows is as fast as one of two 16-bit operands.

Each row has a scale of its own, as each output of the weight has. torch multiplies the 8-bit numbers and applies both
scales to the sums.

Legend: M rows, T rows of x that M sorted rows are gathered from, K inputs, N outputs, E weights.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from attn_backends.kernels.linear.fp8_weight import DTYPE, Fp8Weight
from attn_backends.kernels.linear.streamed_tiling import is_alone
from builders.devices import room_of
from builders.kernels.op import define_op
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, stored_as, tl, triton

MAX_WIDE_ROWS = 64
"""Up to this many rows stay in 16 bits: as many as 8 requests with 7 drafts each verify. With 64, 128, 256 and 512
rows, the products of a layer of Llama-3-8B take 1.02, 1.53, 2.19 and 2.79 of torch's time in bf16 if the rows stay in
16 bits, and 0.88, 0.81, 0.72 and 0.61 in 8 bits; 0.55 with 4,096 (H200)."""

MAX_WIDE_ROWS_OF_MANY_OUTPUTS = 32
"""The same for a weight whose tiles keep every SM busy. With 32 and 64 rows, Llama-3-8B's gate and up take 0.72 and
0.86 of torch's time in bf16 if the rows stay in 16 bits, and 0.61 and 0.60 in 8 bits, without the activation; its
output projection 0.70 and 0.80, and 0.72 and 0.58 (H200)."""

MAX_WIDE_SORTED_ROWS = 512
"""The same for rows sorted by expert. With 512 and 2,048 rows, Qwen3-30B's 128 experts take 0.49 and 1.08 of torch's
time in bf16 if the rows stay in 16 bits, and 0.57 and 0.61 in 8 bits (H200)."""

_LARGEST, _LEAST = torch.finfo(DTYPE).max, torch.finfo(torch.float32).tiny
_ALIGNMENT = 16
"""torch's products of 8-bit numbers need multiples of this many inputs and outputs."""
_CAPABILITIES = (9, 10)
"""Major compute capabilities on which torch multiplies 8-bit rows with a scale each."""


def most_wide_rows(n: int, device: torch.device) -> int:
    """Return the most rows that stay in 16 bits, for an 8-bit weight of n rows."""
    return MAX_WIDE_ROWS if is_alone(n, room_of(device)) else MAX_WIDE_ROWS_OF_MANY_OUTPUTS


def multiplies_narrow_rows(x: torch.Tensor, weight: Fp8Weight) -> bool:
    """Whether `narrow_linear` and `narrow_groups` can multiply the rows of x by this weight."""
    aligned = all(size % _ALIGNMENT == 0 for size in weight.shape[-2:])
    return aligned and x.itemsize == 2 and _has_narrow_products(x.device)


@cache
def _has_narrow_products(device: torch.device) -> bool:
    supported = device.type == "cuda" and torch.version.hip is None
    return supported and torch.cuda.get_device_capability(device)[0] in _CAPABILITIES


def narrow_linear(x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
    """Return x @ weight^T, [M, N] in x's dtype, for 16-bit x [M, K] and weight [N, K], with x rounded to 8 bits."""
    rows, scale = narrow_rows(x)
    # Fast sums: with them the error of 8-bit rows is 0.0267 instead of 0.0265, of 14,336 inputs (H200). torch rounds
    # to bf16 only.
    out: torch.Tensor = torch._scaled_mm(
        rows, weight.values.t(), scale[:, None], weight.scale[None], out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return out.to(x.dtype)


def narrow_groups(
    x: torch.Tensor, weight: Fp8Weight, ends: torch.Tensor, tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply rows sorted by group by their group's weight, with the rows rounded to 8 bits; [M, N] in x's dtype.

    x: 16-bit [M, K], or [T, K] with tokens, int64 [M]: the row of x for each of the M rows. weight: [E, N, K]. ends:
    int32 [E], one past each group's last row.
    """
    rows, scale = narrow_rows(x)
    if tokens is not None:
        rows, scale = rows.view(torch.uint8)[tokens].view(DTYPE), scale[tokens]
    out: torch.Tensor = torch._scaled_grouped_mm(
        rows, weight.values.mT, scale, weight.scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return out.to(x.dtype)


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
        return x.new_empty(x.shape, dtype=DTYPE), x.new_empty(x.shape[0], dtype=torch.float32)

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
        return stored.to(DTYPE), scale


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
