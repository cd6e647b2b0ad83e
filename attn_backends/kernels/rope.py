"""Rotary embedding of heads (RoFormer, eq. 34), half-split: dims i and i + D / 2 are paired."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from builders.kernels.op_by_schema import define_op_by_schema
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


@dataclass(frozen=True, slots=True)
class Rotation:
    """How far each token turns: positions int64 [T]; table fp32 [max_positions, D], cos | sin of D / 2 angles."""

    positions: torch.Tensor
    table: torch.Tensor


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """x [T, H, D] turned, with contiguous last dim; in place, unless a gradient is asked for."""
    if x.requires_grad:
        return rotated(x, rotation.positions, rotation.table)
    _rotate_op(x, rotation.positions, rotation.table)
    return x


def rotate_both(query: torch.Tensor, key: torch.Tensor, rotation: Rotation | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Both turned as by `rotate`; as they are without a rotation."""
    return (query, key) if rotation is None else (rotate(query, rotation), rotate(key, rotation))


def rotated(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The formula, in fp32."""
    cos, sin = table[positions][:, None].chunk(2, -1)
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _rotate(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
    x.copy_(rotated(x, positions, table))


def _launch(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
    tokens, heads, dim = x.shape
    _rotate_kernel[(tokens,)](
        x,
        positions,
        table,
        *x.stride()[:2],
        HEADS=heads,
        HALF=dim // 2,
        BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_D=triton.next_power_of_2(dim // 2),
        num_warps=4,
        **dependent_launch(x.device),
    )


@triton.jit
def _rotate_kernel(
    x,
    positions,
    table,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < HEADS) & (dim < HALF)
    cos, sin = angles_of(table, tl.load(positions + token), dim, HALF)
    at = x + token * token_stride + head * head_stride + dim
    first, second = turned(at, inside, cos, sin, HALF)
    tl.store(at, first, mask=inside)
    tl.store(at + HALF, second, mask=inside)


@triton.jit
def angles_of(table, position, dim, HALF: tl.constexpr):
    """Cosines and sines of a position for pairs `dim`."""
    at = table + position * (2 * HALF) + dim
    return tl.load(at, mask=dim < HALF, other=0.0), tl.load(at + HALF, mask=dim < HALF, other=0.0)


@triton.jit
def turned(at, inside, cos, sin, HALF: tl.constexpr):
    """Both halves of the pairs whose first dims lie `at`, turned and rounded to their dtype."""
    first = tl.load(at, mask=inside, other=0.0)
    second = tl.load(at + HALF, mask=inside, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    return (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)


_rotate_op = define_op_by_schema(
    "spec_decode::rotate",
    "(Tensor(a!) x, Tensor positions, Tensor table) -> ()",
    cpu=_rotate,
    cuda=_launch,
)
