"""Rotary embedding of heads (RoFormer, eq. 34), half-split: dims i and i + D / 2 are paired."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.errors import BatchError, require_tensor, require_vector
from builders.kernels.op import define_op
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


class Rope(NamedTuple):
    """The rotation of each token.

    positions  int64 [T]
    table      fp32 [max_positions, D], cos | sin of D / 2 angles
    """

    positions: torch.Tensor
    table: torch.Tensor


def apply_rope(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotate x [T, H, D], whose last dim is contiguous, in place; returns a new tensor if x requires grad.

    Raises BatchError, and rotates nothing, for tensors that a kernel would misread.
    """
    check_rope(x, rope)
    if x.requires_grad:
        return rope_formula(x, rope)
    _rope_op(x, *rope)
    return x


def check_rope(x: torch.Tensor, rope: Rope) -> None:
    """Raise BatchError unless x is [T, H, D] with a contiguous last dim of pairs, and positions and table fit it."""
    tokens, _, dim = x.shape
    require_vector("positions", rope.positions, length=tokens, dtype=torch.int64, device=x.device)
    require_tensor("the rotary table", rope.table, shape=(None, dim), dtype=torch.float32, device=x.device)
    if dim % 2 or x.stride(2) != 1 or not rope.table.is_contiguous():
        raise BatchError(
            f"rotated heads and the table must have an even number of contiguous dims, got {dim} with strides "
            f"{x.stride()}, table {rope.table.stride()}; a kernel would mispair elements. Keep the head dim innermost."
        )


def rope_formula(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotate x [T, H, D] in fp32 and round to its dtype; differentiable."""
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
            x_ptr=self.x,
            positions_ptr=self.positions,
            cos_sin_ptr=self.table,
            stride_x_token=self.x.stride(0),
            stride_x_head=self.x.stride(1),
            HEADS=heads,
            HALF_DIM=dim // 2,
            BLOCK_H=next_power_of_2(heads),
            BLOCK_D=next_power_of_2(dim // 2),
            num_warps=4,
            **dependent_launch(self.x.device),
        )


@triton.jit
def _rope_kernel(
    x_ptr,  # in and out: [T, H, D]
    positions_ptr,  # int64 [T]
    cos_sin_ptr,  # fp32 [max_positions, D]
    stride_x_token,
    stride_x_head,
    HEADS: tl.constexpr,  # H
    HALF_DIM: tl.constexpr,  # D / 2
    BLOCK_H: tl.constexpr,  # H, rounded up to a power of two
    BLOCK_D: tl.constexpr,  # D / 2, likewise
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """(x1, x2) = (x1 cos - x2 sin, x2 cos + x1 sin), with x1 and x2 the halves of a head. One program per token."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < HEADS) & (offs_d < HALF_DIM)
    cos, sin = angles_of(cos_sin_ptr, tl.load(positions_ptr + token), offs_d, HALF_DIM)
    x_ptrs = x_ptr + token * stride_x_token + head * stride_x_head + offs_d
    x1, x2 = rotated_pairs(x_ptrs, mask, cos, sin, HALF_DIM)
    tl.store(x_ptrs, x1, mask=mask)
    tl.store(x_ptrs + HALF_DIM, x2, mask=mask)


@triton.jit
def angles_of(cos_sin_ptr, position, offs_d, HALF_DIM: tl.constexpr):
    """Load the cosines and sines of a position for the pairs offs_d."""
    cos_ptrs = cos_sin_ptr + position * (2 * HALF_DIM) + offs_d
    mask = offs_d < HALF_DIM
    return tl.load(cos_ptrs, mask=mask, other=0.0), tl.load(cos_ptrs + HALF_DIM, mask=mask, other=0.0)


@triton.jit
def rotated_pairs(
    x_ptrs,  # pointers to the first half of each head's dims
    mask,  # bool, of the shape of x_ptrs
    cos,  # fp32, broadcasts to it
    sin,
    HALF_DIM: tl.constexpr,  # D / 2
):
    """Load the pairs whose first dims are at x_ptrs; return both halves, rotated and rounded to their dtype."""
    first = tl.load(x_ptrs, mask=mask, other=0.0)
    second = tl.load(x_ptrs + HALF_DIM, mask=mask, other=0.0)
    x1, x2 = first.to(tl.float32), second.to(tl.float32)
    return (x1 * cos - x2 * sin).to(first.dtype), (x2 * cos + x1 * sin).to(first.dtype)


_rope_op = define_op("attn_backends::rope", _RopeArguments, mutates=("x",))
