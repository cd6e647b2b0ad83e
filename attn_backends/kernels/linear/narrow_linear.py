"""Products of many rows with an 8-bit weight: the rows are rounded to 8 bits too, because tensor cores multiply 8 bits
twice as fast as 16, and no product that keeps 16-bit rows is as fast as one of two 16-bit operands.

Each row has a scale of its own, as each output of the weight has. torch multiplies the 8-bit numbers and applies both
scales to the sums. Up to `most_streamed_rows`, streamed_linear does, in less time.

Legend: M rows, T rows of x that M sorted rows are gathered from, K inputs, N outputs, E weights.
"""

from __future__ import annotations

from functools import cache

import torch

from attn_backends.kernels.linear.fp8_weight import DTYPE, Fp8Weight
from attn_backends.kernels.linear.narrow_rows import narrow_rows
from attn_backends.kernels.linear.streamed_tiling import MAX_NARROW_ROWS, is_alone
from builders.devices import room_of

MAX_WIDE_ROWS = 16
"""Up to this many rows stay in 16 bits where `streamed_linear` multiplies more of them in 8 bits. With 8 and 32 rows,
the products of a layer of Llama-3-8B take 69 and 90 us if the rows stay in 16 bits, and 70 and 72 us in 8 (H200)."""

MAX_WIDE_ROWS_OF_FEW_OUTPUTS, MAX_WIDE_ROWS_OF_MANY_OUTPUTS = 64, 32
"""The same where only torch multiplies rows in 8 bits: for a weight whose tiles leave SMs idle, and for others. If 32
and 64 rows stay in 16 bits, the three such weights of a layer of Llama-3-8B take 0.67 and 0.75 of torch's time, gate
and up 1.12 and 1.59 with the activation, torch's without it, and the output projection 0.91 and 1.38 (H200)."""

MAX_WIDE_SORTED_ROWS = 512
"""The same for rows sorted by expert. With 512 and 2,048 rows, Qwen3-30B's 128 experts take 0.49 and 1.08 of torch's
time in bf16 if the rows stay in 16 bits, and 0.57 and 0.61 in 8 bits (H200)."""

STREAMED_ROWS_OF_ANY_WEIGHT = 128
"""Up to this many rounded rows of any weight, `streamed_linear` multiplies. With 32, 64 and 128 rows, the products of a
layer of Llama-3-8B take 72, 78 and 86 us with the activation, and torch's 109, 111 and 112 us without it; its output
projection 127, 134 and 158 us, and torch's 193, 169 and 154. With 256, 14,336 inputs to 4,096 outputs take 34 us,
torch's 43, and gate and up 61 us, torch's 60 without the activation; others 1.05 to 1.27 of torch's time (H200)."""

_ALIGNMENT = 16
"""torch's products of 8-bit numbers need multiples of this many inputs and outputs."""
_CAPABILITIES = (9, 10)
"""Major compute capabilities on which torch multiplies 8-bit rows with a scale each."""


def most_wide_rows(n: int, device: torch.device) -> int:
    """Return the most rows that stay in 16 bits, for an 8-bit weight of n rows."""
    room = room_of(device)
    if room.wgmma:
        return MAX_WIDE_ROWS
    return MAX_WIDE_ROWS_OF_FEW_OUTPUTS if is_alone(n, room) else MAX_WIDE_ROWS_OF_MANY_OUTPUTS


def most_streamed_rows(n: int, k: int, device: torch.device, *, gated: bool) -> int:
    """Return the most rows in 8 bits that `streamed_linear` multiplies faster than torch, for an 8-bit weight of n rows
    and k inputs. gated: it holds gate and up, whose activation torch leaves to another kernel."""
    room = room_of(device)
    more = gated or (is_alone(n, room) and k >= 2 * n)
    return (MAX_NARROW_ROWS if more else STREAMED_ROWS_OF_ANY_WEIGHT) if room.wgmma else 0


def multiplies_narrow_rows(x: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether `narrow_linear` and `narrow_groups` can multiply the rows of x by an 8-bit weight with these values."""
    n, k = values.shape[-2:]
    return not (n % _ALIGNMENT or k % _ALIGNMENT) and x.itemsize == 2 and _has_narrow_products(x.device)


@cache
def _has_narrow_products(device: torch.device) -> bool:
    supported = device.type == "cuda" and torch.version.hip is None
    return supported and torch.cuda.get_device_capability(device)[0] in _CAPABILITIES


def narrow_linear(x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
    """Return x @ weight^T, [M, N] in x's dtype, for 16-bit x [M, K] and weight [N, K], with x rounded to 8 bits."""
    return product_of_narrow_rows(*narrow_rows(x), weight.values, weight.scale, x.dtype)


def product_of_narrow_rows(
    rows: torch.Tensor, row_scale: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the product of `narrow_rows` by an 8-bit weight [N, K] with these `operands`, [M, N] in this dtype."""
    # Fast sums: with them the error of 8-bit rows is 0.0267 instead of 0.0265, of 14,336 inputs (H200). torch rounds
    # to bf16 only.
    out: torch.Tensor = torch._scaled_mm(
        rows, values.t(), row_scale.unsqueeze(1), scale.unsqueeze(0), out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return out if dtype == torch.bfloat16 else out.to(dtype)


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
