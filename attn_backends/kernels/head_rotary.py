"""Rotary embedding in interleaved pairs on the last dims of heads: queries forward, outputs back.

Shape legend: T tokens, H heads, D head dim, R rotary dims. The table: see `latent_rotary`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from attn_backends.kernels.latent_rotary import check_rotary, rounded, turn_tail, turned
from builders.errors import require
from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton

_TILE = 2048
"""Elements per program, which set the number of heads it processes."""


def prepare_query(query: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Norm every head of a query, query / rms(query) over D, and rotate its last R dims by its position.

    query      [T, H, D], contiguous in its last dim
    positions  int64 [T]
    table      fp32 [max_positions, R]

    Returns a new contiguous [T, H, D] in query's dtype, computed in fp32 and rounded once: by one kernel, or by the
    differentiable formula if query requires grad. Raises BatchError for tensors that a kernel would misread.
    """
    _check(query, positions, table)
    if query.requires_grad:
        return PrepareQuery(query, positions, table, eps).reference()
    return _prepare_query(query, positions, table, eps)


def inverse_rotary(out: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate the last R dims of an output back by its positions; returns the rotated tensor.

    out        [T, H, D], contiguous in its last dim; written in place, unless it requires grad
    positions  int64 [T]
    table      fp32 [max_positions, R]

    In fp32, rounded to out's dtype; the other dims are unchanged. Raises BatchError for tensors that a kernel would
    misread.
    """
    _check(out, positions, table)
    if out.requires_grad:
        return turned(out.float(), positions, table, inverse=True).to(out.dtype)
    _inverse_rotary(out, positions, table)
    return out


def _check(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
    require(
        x.dim() == 3 and x.stride(2) == 1,
        f"rotated heads must be [tokens, heads, dim] with a contiguous last dim, got {list(x.shape)} with strides "
        f"{list(x.stride())}; a kernel would mispair dims. Make it contiguous first.",
    )
    check_rotary(x, positions, table)


class PrepareQuery(NamedTuple):
    """The arguments of `prepare_query`."""

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
        block_d = next_power_of_2(dim)
        block_h = _heads_a_program(heads, block_d)
        _prepare_query_kernel[(tokens, cdiv(heads, block_h))](
            q_ptr=self.query,
            positions_ptr=self.positions,
            cos_sin_ptr=self.table,
            o_ptr=out,
            stride_q_token=self.query.stride(0),
            stride_q_head=self.query.stride(1),
            eps=self.eps,
            HEADS=heads,
            HEAD_DIM=dim,
            ROTARY=self.table.shape[1],
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            num_warps=4,
            **dependent_launch(out.device),
        )
        return out


class InverseRotary(NamedTuple):
    """The arguments of `inverse_rotary`."""

    out: torch.Tensor
    positions: torch.Tensor
    table: torch.Tensor

    def reference(self) -> None:
        tail = self.out[..., -self.table.shape[1] :]
        tail.copy_(turned(tail.float(), self.positions, self.table, inverse=True))

    def launch(self) -> None:
        (tokens, heads, dim), rotary = self.out.shape, self.table.shape[1]
        block_r = next_power_of_2(rotary)
        block_h = _heads_a_program(heads, block_r)
        _inverse_rotary_kernel[(tokens, cdiv(heads, block_h))](
            o_ptr=self.out,
            positions_ptr=self.positions,
            cos_sin_ptr=self.table,
            stride_o_token=self.out.stride(0),
            stride_o_head=self.out.stride(1),
            HEADS=heads,
            SKIPPED=dim - rotary,
            ROTARY=rotary,
            BLOCK_H=block_h,
            BLOCK_R=block_r,
            num_warps=4,
            **dependent_launch(self.out.device),
        )


def _heads_a_program(heads: int, block: int) -> int:
    return int(min(next_power_of_2(heads), max(1, _TILE // block)))


@triton.jit
def _prepare_query_kernel(
    q_ptr,  # [T, H, D]
    positions_ptr,  # int64 [T]
    cos_sin_ptr,  # fp32 [max_positions, R]
    o_ptr,  # out: [T, H, D], contiguous
    stride_q_token,
    stride_q_head,
    eps,
    HEADS: tl.constexpr,  # H
    HEAD_DIM: tl.constexpr,  # D
    ROTARY: tl.constexpr,  # R
    BLOCK_H: tl.constexpr,  # heads per program
    BLOCK_D: tl.constexpr,  # D, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """q / rms(q), its last R dims rotated. One program per BLOCK_H heads of a token; grid [T, ceil(H / BLOCK_H)]."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < HEADS) & (offs_d < HEAD_DIM)
    x = tl.load(q_ptr + token * stride_q_token + head * stride_q_head + offs_d, mask=mask, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
    angles_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * ROTARY
    x = turn_tail(x, angles_ptr, HEAD_DIM, ROTARY, False, BLOCK_H, BLOCK_D)
    tl.store(o_ptr + (token * HEADS + head) * HEAD_DIM + offs_d, rounded(x, o_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _inverse_rotary_kernel(
    o_ptr,  # in and out: [T, H, D]
    positions_ptr,  # int64 [T]
    cos_sin_ptr,  # fp32 [max_positions, R]
    stride_o_token,
    stride_o_head,
    HEADS: tl.constexpr,  # H
    SKIPPED: tl.constexpr,  # D - R
    ROTARY: tl.constexpr,  # R
    BLOCK_H: tl.constexpr,  # heads per program
    BLOCK_R: tl.constexpr,  # R, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """The last R dims of o rotated back. One program per BLOCK_H heads of a token; grid [T, ceil(H / BLOCK_H)]."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
    offs_d = tl.arange(0, BLOCK_R)[None, :]
    mask = (head < HEADS) & (offs_d < ROTARY)
    o_ptrs = o_ptr + token * stride_o_token + head * stride_o_head + SKIPPED + offs_d
    x = tl.load(o_ptrs, mask=mask, other=0.0).to(tl.float32)
    angles_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * ROTARY
    x = turn_tail(x, angles_ptr, ROTARY, ROTARY, True, BLOCK_H, BLOCK_R)
    tl.store(o_ptrs, rounded(x, o_ptr.dtype.element_ty), mask=mask)


_prepare_query = define_op("attn_backends::prepare_query", PrepareQuery)
_inverse_rotary = define_op("attn_backends::inverse_rotary", InverseRotary, mutates=("out",))
