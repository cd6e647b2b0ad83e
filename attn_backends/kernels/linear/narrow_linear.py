"""Products of many rows with an 8-bit weight: the rows are rounded to 8 bits too, because tensor cores multiply 8 bits
twice as fast as 16, and no product that keeps 16-bit rows is as fast as one of two 16-bit operands.

Each row has a scale of its own, as each output of the weight has. torch multiplies the 8-bit numbers and applies both
scales to the sums; up to STREAMED_ROWS, streamed_linear does.

Legend: M rows, T rows of x that M sorted rows are gathered from, K inputs, N outputs, E weights.
"""

from __future__ import annotations

from functools import cache

import torch

from attn_backends.kernels.linear.fp8_weight import DTYPE, Fp8Weight
from attn_backends.kernels.linear.narrow_rows import narrow_rows
from attn_backends.kernels.linear.streamed_tiling import is_alone
from builders.devices import room_of

MAX_WIDE_ROWS = 64
"""Up to this many rows stay in 16 bits: as many as 8 requests with 7 drafts each verify. With 8, 32, 64, 128 and 256
rows, the products of a layer of Llama-3-8B take 0.56, 0.71, 0.83, 1.53 and 2.19 of torch's time in bf16 if the rows
stay in 16 bits, and 0.89, 0.86, 0.85, 0.81 and 0.72 in 8 bits; 0.55 with 4,096 (H200)."""

MAX_WIDE_ROWS_OF_MANY_OUTPUTS = 32
"""The same for a weight whose tiles keep every SM busy. With 32 and 64 rows, Llama-3-8B's gate and up take 0.72 and
0.86 of torch's time in bf16 if the rows stay in 16 bits, and 0.61 and 0.60 in 8 bits, without the activation; its
output projection 0.70 and 0.80, and 0.72 and 0.58 (H200)."""

MAX_WIDE_SORTED_ROWS = 512
"""The same for rows sorted by expert. With 512 and 2,048 rows, Qwen3-30B's 128 experts take 0.49 and 1.08 of torch's
time in bf16 if the rows stay in 16 bits, and 0.57 and 0.61 in 8 bits (H200)."""

STREAMED_ROWS = 0
"""Up to this many rounded rows of an 8-bit weight of few outputs, `streamed_linear` multiplies, which can take
MAX_NARROW_ROWS: none before it has run on a GPU. torch has no more programs than tiles, so such a weight leaves SMs
idle: with 8 to 128 rows, Llama-3-8B's products of 4,096 and 6,144 outputs take 2.7 to 4 times as long as reading the
weight once (H200)."""

_ALIGNMENT = 16
"""torch's products of 8-bit numbers need multiples of this many inputs and outputs."""
_CAPABILITIES = (9, 10)
"""Major compute capabilities on which torch multiplies 8-bit rows with a scale each."""


def most_wide_rows(n: int, device: torch.device) -> int:
    """Return the most rows that stay in 16 bits, for an 8-bit weight of n rows."""
    return MAX_WIDE_ROWS if is_alone(n, room_of(device)) else MAX_WIDE_ROWS_OF_MANY_OUTPUTS


def streams_narrow_rows(rows: int, n: int, device: torch.device) -> bool:
    """Whether `streamed_linear` is the kernel for so many rows in 8 bits and an 8-bit weight of n rows."""
    room = room_of(device)
    return rows <= STREAMED_ROWS and room.wgmma and is_alone(n, room)


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
