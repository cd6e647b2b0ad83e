"""Rotary embedding of the leading heads of a packed projection, in place."""

from __future__ import annotations

import torch

from builders._ops import define_op
from builders._triton import tl, triton


def rotate(packed: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotate heads 0 .. heads-1 of packed [T, H, D] to positions int64 [T]; returns the rotated tensor.

    table fp32 [max_positions, D] holds cos | sin of D / 2 angles; dims i and i + D / 2 are paired. In place, unless a
    gradient is asked for.
    """
    if packed.requires_grad:
        return torch.cat([rotated(packed[:, :heads], positions, table), packed[:, heads:]], 1)
    _rotate_op(packed, positions, table, heads)
    return packed


def rotated(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The formula, in fp32: x [T, H, D] turned by the angles of its positions."""
    cos, sin = table[positions][:, None].chunk(2, -1)
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _rotate(packed: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, heads: int) -> None:
    packed[:, :heads] = rotated(packed[:, :heads], positions, table)


def _launch(packed: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, heads: int) -> None:
    half = packed.shape[2] // 2
    _rotate_kernel[(packed.shape[0],)](
        packed,
        positions,
        table,
        *packed.stride()[:2],
        HEADS=heads,
        HALF=half,
        BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_D=triton.next_power_of_2(half),
        num_warps=4,
    )


@triton.jit
def _rotate_kernel(
    packed,
    positions,
    table,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < HEADS) & (dim < HALF)
    angles = table + tl.load(positions + token) * (2 * HALF) + dim
    cos = tl.load(angles, mask=dim < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=dim < HALF, other=0.0)
    at = packed + token * token_stride + head * head_stride + dim
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (first * cos - second * sin).to(packed.dtype.element_ty), mask=inside)
    tl.store(at + HALF, (second * cos + first * sin).to(packed.dtype.element_ty), mask=inside)


_rotate_op = define_op(
    "spec_decode::rotate",
    "(Tensor(a!) packed, Tensor positions, Tensor table, int heads) -> ()",
    cpu=_rotate,
    cuda=_launch,
)
