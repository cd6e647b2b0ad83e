"""Rotary embedding in interleaved pairs on the last dims of a latent or a head: queries forward, outputs back.

Shape legend: T tokens, H heads, D head dim, R rotary dims. table fp32 [max_positions, R] holds cos | sin of R / 2
angles; pair i is dims D - R + 2i and D - R + 2i + 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.errors import require, require_tensor
from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton

_TILE = 2048
"""Elements a program holds at once, spread over as many heads as that gives."""


def prepare_query(query: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Norm every head of a query, query / rms(query) over D, and rotate its last R dims to its position.

    query      [T, H, D], contiguous in its last dim
    positions  int64 [T]
    table      fp32 [max_positions, R]

    Returns a new contiguous [T, H, D] in query's dtype, computed in fp32 and rounded once. One kernel, or the
    differentiable formula where query asks for a gradient. Raises BatchError for tensors that a kernel would misread.
    """
    _check(query, positions, table)
    if query.requires_grad:
        return PrepareQuery(query, positions, table, eps).reference()
    return _prepare_query(query, positions, table, eps)


def inverse_rotary(out: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate the last R dims of an output back from its positions; returns the rotated tensor.

    out        [T, H, D], contiguous in its last dim; written in place, unless it asks for a gradient
    positions  int64 [T]
    table      fp32 [max_positions, R]

    In fp32, rounded to out's dtype; the other dims stay as they are. Raises BatchError for tensors that a kernel would
    misread.
    """
    _check(out, positions, table)
    if out.requires_grad:
        return turned(out.float(), positions, table, inverse=True).to(out.dtype)
    _inverse_rotary(out, positions, table)
    return out


def turned(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """The formula: the last R dims of x [T, ..., D] rotated by the angles of positions int64 [T], or back by them."""
    rotary = table.shape[1]
    cos, sin = table[positions].view(-1, *[1] * (x.dim() - 2), rotary).chunk(2, -1)
    sin = -sin if inverse else sin
    even, odd = x[..., -rotary:].unflatten(-1, (-1, 2)).unbind(-1)
    tail = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([x[..., :-rotary], tail], -1)


def check_rotary(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
    """Raise BatchError unless positions and table fit the rows x [T, ..., D]."""
    require_tensor("positions", positions, shape=x.shape[:1], dtype=torch.int64, device=x.device)
    require_tensor("the rotary table", table, shape=(None, None), dtype=torch.float32, device=x.device)
    dim, rotary = x.shape[-1], table.shape[1]
    require(
        0 < rotary <= dim and rotary % 2 == 0 and dim % 2 == 0 and table.is_contiguous(),
        "a rotary table is contiguous, and it and a row have an even number of dims, its own at most the row's, got "
        f"{list(table.shape)} with strides {list(table.stride())} for rows of {dim}; pairs would meet other angles. "
        "Build the table for the dims that turn.",
    )


def _check(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
    require(
        x.dim() == 3 and x.stride(2) == 1,
        f"rotated heads must be [tokens, heads, dim] with a contiguous last dim, got {list(x.shape)} with strides "
        f"{list(x.stride())}; a kernel would pair other dims. Make it contiguous first.",
    )
    check_rotary(x, positions, table)


class PrepareQuery(NamedTuple):
    """As `prepare_query` has them."""

    query: torch.Tensor
    positions: torch.Tensor
    table: torch.Tensor
    eps: float

    def reference(self) -> torch.Tensor:
        wide = self.query.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return turned(wide, self.positions, self.table).to(self.query.dtype).contiguous()

    def fake(self) -> torch.Tensor:
        return self.query.new_empty(self.query.shape)

    def launch(self) -> torch.Tensor:
        tokens, heads, dim = self.query.shape
        out = self.query.new_empty(self.query.shape)
        block_d = triton.next_power_of_2(dim)
        block_h = _heads_a_program(heads, block_d)
        _prepare_query_kernel[(tokens, triton.cdiv(heads, block_h))](
            *self[:3],
            out,
            *self.query.stride()[:2],
            self.eps,
            HEADS=heads,
            DIM=dim,
            ROTARY=self.table.shape[1],
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            num_warps=4,
            **dependent_launch(out.device),
        )
        return out


class InverseRotary(NamedTuple):
    """As `inverse_rotary` has them."""

    out: torch.Tensor
    positions: torch.Tensor
    table: torch.Tensor

    def reference(self) -> None:
        tail = self.out[..., -self.table.shape[1] :]
        tail.copy_(turned(tail.float(), self.positions, self.table, inverse=True))

    def launch(self) -> None:
        (tokens, heads, dim), rotary = self.out.shape, self.table.shape[1]
        block_r = triton.next_power_of_2(rotary)
        block_h = _heads_a_program(heads, block_r)
        _inverse_rotary_kernel[(tokens, triton.cdiv(heads, block_h))](
            *self,
            *self.out.stride()[:2],
            HEADS=heads,
            SKIPPED=dim - rotary,
            ROTARY=rotary,
            BLOCK_H=block_h,
            BLOCK_R=block_r,
            num_warps=4,
            **dependent_launch(self.out.device),
        )


def _heads_a_program(heads: int, block: int) -> int:
    return int(min(triton.next_power_of_2(heads), max(1, _TILE // block)))


@triton.jit
def turn_tail(
    rows,  # fp32 [ROWS, BLOCK]
    angles,  # fp32 [ROTARY], the table's row of a position
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    INVERSE: tl.constexpr,  # turn back
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """rows fp32 [ROWS, BLOCK], of which DIM columns count, the last ROTARY of them turned by cos | sin at angles."""
    pair = tl.arange(0, BLOCK // 2)
    angle = pair - (DIM - ROTARY) // 2
    turns = (angle >= 0) & (angle < ROTARY // 2)
    cos = tl.load(angles + angle, mask=turns, other=1.0)[None, :]
    sin = tl.load(angles + ROTARY // 2 + angle, mask=turns, other=0.0)[None, :]
    if INVERSE:
        sin = -sin
    even, odd = tl.split(tl.reshape(rows, (ROWS, BLOCK // 2, 2)))
    # Not left to cos 1 and sin 0: 0 * inf would spread over the pair, and -0 would lose its sign.
    new_even = tl.where(turns[None, :], even * cos - odd * sin, even)
    new_odd = tl.where(turns[None, :], odd * cos + even * sin, odd)
    return tl.interleave(new_even, new_odd)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x (fp32) in the dtype, to nearest even on every machine: the interpreter's conversion to bfloat16 truncates."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        near = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        # The carry would make a number of a NaN with a full mantissa, which is the one that GPUs produce.
        x = tl.where(x == x, near, x)
    return x.to(dtype)


@triton.jit
def _prepare_query_kernel(
    query,  # [T, H, D]
    positions,  # int64 [T]
    table,  # fp32 [max_positions, R]
    out,  # out: [T, H, D], contiguous
    token_stride,
    head_stride,
    eps,
    HEADS: tl.constexpr,  # H
    DIM: tl.constexpr,  # D
    ROTARY: tl.constexpr,  # R
    BLOCK_H: tl.constexpr,  # heads of a program
    BLOCK_D: tl.constexpr,  # D, rounded up to a power of two
    PDL: tl.constexpr,
):
    """One program norms and rotates BLOCK_H heads of one token."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < HEADS) & (dim < DIM)
    rows = tl.load(query + token * token_stride + head * head_stride + dim, mask=inside, other=0.0).to(tl.float32)
    rows = rows * tl.rsqrt(tl.sum(rows * rows, 1) / DIM + eps)[:, None]
    angles = table + tl.load(positions + token) * ROTARY
    rows = turn_tail(rows, angles, DIM, ROTARY, False, BLOCK_H, BLOCK_D)
    tl.store(out + (token * HEADS + head) * DIM + dim, rounded(rows, out.dtype.element_ty), mask=inside)


@triton.jit
def _inverse_rotary_kernel(
    out,  # in and out: [T, H, D]
    positions,  # int64 [T]
    table,  # fp32 [max_positions, R]
    token_stride,
    head_stride,
    HEADS: tl.constexpr,  # H
    SKIPPED: tl.constexpr,  # D - R
    ROTARY: tl.constexpr,  # R
    BLOCK_H: tl.constexpr,  # heads of a program
    BLOCK_R: tl.constexpr,  # R, rounded up to a power of two
    PDL: tl.constexpr,
):
    """One program rotates the last R dims of BLOCK_H heads of one token back."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
    dim = tl.arange(0, BLOCK_R)[None, :]
    inside = (head < HEADS) & (dim < ROTARY)
    at = out + token * token_stride + head * head_stride + SKIPPED + dim
    rows = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    angles = table + tl.load(positions + token) * ROTARY
    rows = turn_tail(rows, angles, ROTARY, ROTARY, True, BLOCK_H, BLOCK_R)
    tl.store(at, rounded(rows, out.dtype.element_ty), mask=inside)


_prepare_query = define_op("attn_backends::prepare_query", PrepareQuery)
_inverse_rotary = define_op("attn_backends::inverse_rotary", InverseRotary, mutates=("out",))
