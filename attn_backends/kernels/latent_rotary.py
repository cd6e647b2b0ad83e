"""Rotary embedding in interleaved pairs on the last dims of a latent or a head: the formula, and the parts of kernels.

Shape legend: T tokens, D head dim, R rotary dims. table fp32 [max_positions, R] holds cos | sin of R / 2 angles; pair i
is dims D - R + 2i and D - R + 2i + 1.
"""

from __future__ import annotations

import torch

from builders.errors import require, require_tensor, require_vector
from builders.kernels.triton_runtime import tl, triton


def turned(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """Rotate the last R dims of x [T, ..., D] by the angles of positions, int64 [T], or back; the reference formula."""
    rotary = table.shape[1]
    cos, sin = table[positions].view(-1, *[1] * (x.dim() - 2), rotary).chunk(2, -1)
    sin = -sin if inverse else sin
    even, odd = x[..., -rotary:].unflatten(-1, (-1, 2)).unbind(-1)
    tail = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([x[..., :-rotary], tail], -1)


def check_rotary(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
    """Raise BatchError unless positions and table fit the rows x [T, ..., D]."""
    require_vector("positions", positions, length=x.shape[0], dtype=torch.int64, device=x.device)
    require_tensor("the rotary table", table, shape=(None, None), dtype=torch.float32, device=x.device)
    dim, rotary = x.shape[-1], table.shape[1]
    require(
        0 < rotary <= dim and rotary % 2 == 0 and dim % 2 == 0 and table.is_contiguous(),
        "a rotary table must be contiguous, and it and a row must have an even number of dims, the table at most the "
        f"row's, got {list(table.shape)} with strides {list(table.stride())} for rows of {dim}; pairs would get wrong "
        "angles. Build the table for the rotated dims.",
    )


@triton.jit
def turn_tail(
    x,  # fp32 [ROWS, BLOCK]
    angles_ptr,  # fp32 [ROTARY], the table's row of a position
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    INVERSE: tl.constexpr,  # rotate back
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate the last ROTARY of x's HEAD_DIM valid columns by the cos | sin at angles_ptr."""
    offs_pair = tl.arange(0, BLOCK // 2)
    offs_angle = offs_pair - (HEAD_DIM - ROTARY) // 2
    mask = (offs_angle >= 0) & (offs_angle < ROTARY // 2)
    cos = tl.load(angles_ptr + offs_angle, mask=mask, other=1.0)[None, :]
    sin = tl.load(angles_ptr + ROTARY // 2 + offs_angle, mask=mask, other=0.0)[None, :]
    if INVERSE:
        sin = -sin
    even, odd = tl.split(tl.reshape(x, (ROWS, BLOCK // 2, 2)))
    # cos 1 and sin 0 would not do: 0 * inf would spread over the pair, and -0 would lose its sign.
    new_even = tl.where(mask[None, :], even * cos - odd * sin, even)
    new_odd = tl.where(mask[None, :], odd * cos + even * sin, odd)
    return tl.interleave(new_even, new_odd)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Round x (fp32) to the dtype, to nearest even everywhere: the interpreter's conversion to bfloat16 truncates."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        # Add half of the last kept place, minus one if that is even (ties go to even); then clear the 16 low bits.
        near = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        # The carry would turn a NaN with a full mantissa, the one that GPUs produce, into a number.
        x = tl.where(x == x, near, x)
    return x.to(dtype)
