"""Rotary embedding of heads (RoFormer, eq. 34), half-split: dims i and i + D / 2 are paired."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


class Rope(NamedTuple):
    """How far each token rotates.

    positions  int64 [T]
    table      fp32 [max_positions, D], cos | sin of D / 2 angles
    """

    positions: torch.Tensor
    table: torch.Tensor


def apply_rope(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """x [T, H, D] rotated, with contiguous last dim; in place, unless x asks for a gradient."""
    if x.requires_grad:
        return rope_formula(x, rope)
    _rope_op(x, *rope)
    return x


def rope_formula(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """x [T, H, D] rotated in fp32, rounded to its dtype; differentiable."""
    cos, sin = rope.table[rope.positions][:, None].chunk(2, -1)
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class _RopeArguments(NamedTuple):
    x: torch.Tensor
    positions: torch.Tensor
    table: torch.Tensor

    def reference(self) -> None:
        self.x.copy_(rope_formula(self.x, Rope(self.positions, self.table)))

    def launch(self) -> None:
        tokens, heads, dim = self.x.shape
        _rope_kernel[(tokens,)](
            *self,
            *self.x.stride()[:2],
            HEADS=heads,
            HALF=dim // 2,
            BLOCK_H=triton.next_power_of_2(heads),
            BLOCK_D=triton.next_power_of_2(dim // 2),
            num_warps=4,
            **dependent_launch(self.x.device),
        )


@triton.jit
def _rope_kernel(
    x,  # in and out: [T, H, D]
    positions,  # int64 [T]
    table,  # fp32 [max_positions, D]
    token_stride,
    head_stride,
    HEADS: tl.constexpr,  # H
    HALF: tl.constexpr,  # D / 2
    BLOCK_H: tl.constexpr,  # H, rounded up to a power of two
    BLOCK_D: tl.constexpr,  # D / 2, likewise
    PDL: tl.constexpr,
):
    """One program rotates all heads of one token."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < HEADS) & (dim < HALF)
    cos, sin = angles_of(table, tl.load(positions + token), dim, HALF)
    at = x + token * token_stride + head * head_stride + dim
    first, second = rotated_pairs(at, inside, cos, sin, HALF)
    tl.store(at, first, mask=inside)
    tl.store(at + HALF, second, mask=inside)


@triton.jit
def angles_of(table, position, dim, HALF: tl.constexpr):
    """Cosines and sines of a position for pairs `dim`."""
    at = table + position * (2 * HALF) + dim
    return tl.load(at, mask=dim < HALF, other=0.0), tl.load(at + HALF, mask=dim < HALF, other=0.0)


@triton.jit
def rotated_pairs(
    at,  # where the first half of each head's dims is stored
    inside,  # bool, of the shape of `at`
    cos,  # fp32, broadcasts to `at`
    sin,
    HALF: tl.constexpr,  # D / 2
):
    """Both halves of the pairs whose first dims lie `at`, rotated and rounded to their dtype."""
    first = tl.load(at, mask=inside, other=0.0)
    second = tl.load(at + HALF, mask=inside, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    return (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)


_rope_op = define_op("attn_backends::rope", _RopeArguments, mutates=("x",))
