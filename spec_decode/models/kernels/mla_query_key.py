"""The query and the key of multi-head latent attention, put together of their parts in one kernel.

Legend: T tokens, H heads, L dims of the latent, R rotary dims. Floats are of one dtype; all work happens in fp32 and is
rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from attn_backends.kernels.latent_rotary import check_rotary, turned
from attn_backends.kernels.rope import Rope
from builders.errors import require, require_tensor
from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.models.kernels.stored_as import stored_as


def mla_query_key(
    absorbed: torch.Tensor,
    rotated: torch.Tensor,
    latent: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    rope: Rope,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The query [T, H, L + R], absorbed beside the turned part; the key [T, 1, L + R], the normed latent likewise.

    absorbed  [T, H, L], the query without positions, times the latent's projection to keys
    rotated   [T, H, R], the query's part that turns with its position
    latent    [T, L + R] as projected: the latent, and the key's part that turns
    norm      [L], the weight of the latent's RMS norm with eps

    All but norm adjacent in their last dim. Raises BatchError for tensors that do not fit, with nothing run.
    """
    (tokens, heads, dims), rotary = absorbed.shape, rope.table.shape[1]
    device, dtype = absorbed.device, absorbed.dtype
    require_tensor("the query's turning part", rotated, shape=(tokens, heads, rotary), dtype=dtype, device=device)
    require_tensor("the latent", latent, shape=(tokens, dims + rotary), dtype=dtype, device=device)
    require_tensor("the norm of the latent", norm, shape=(dims,), dtype=norm.dtype, device=device)
    check_rotary(latent, *rope)
    require(
        absorbed.stride(2) == rotated.stride(2) == latent.stride(1) == 1,
        f"a query and a key are put together of parts adjacent in their last dim, got strides {absorbed.stride()}, "
        f"{rotated.stride()} and {latent.stride()}. Make them contiguous.",
    )
    arguments = MlaQueryKey(absorbed, rotated, latent, norm, *rope, eps)
    if any(each.requires_grad for each in (absorbed, rotated, latent, norm)):
        return arguments.reference()
    return _mla_query_key(*arguments)


class MlaQueryKey(NamedTuple):
    """As `mla_query_key` has them."""

    absorbed: torch.Tensor
    rotated: torch.Tensor
    latent: torch.Tensor
    norm: torch.Tensor
    positions: torch.Tensor
    table: torch.Tensor
    eps: float

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, dims = self.latent.dtype, self.absorbed.shape[2]
        turning = turned(self.rotated.float(), self.positions, self.table).to(dtype)
        latent, shared = self.latent.float().split([dims, self.table.shape[1]], -1)
        normed = F.rms_norm(latent, (dims,), self.norm.float(), self.eps)
        key = torch.cat([normed, turned(shared, self.positions, self.table)], -1).to(dtype)
        return torch.cat([self.absorbed, turning], -1), key[:, None]

    def fake(self) -> tuple[torch.Tensor, torch.Tensor]:
        (tokens, heads, _), width = self.absorbed.shape, self.latent.shape[1]
        return self.latent.new_empty(tokens, heads, width), self.latent.new_empty(tokens, 1, width)

    def launch(self) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, heads, dims = self.absorbed.shape
        query, key = self.fake()
        stored = stored_as(query), stored_as(key)
        _mla_query_key_kernel[(tokens, heads + 1)](
            *self[:6],
            *stored,
            *self.absorbed.stride()[:2],
            *self.rotated.stride()[:2],
            self.latent.stride(0),
            self.eps,
            heads,
            DIMS=dims,
            ROTARY=self.table.shape[1],
            BLOCK=triton.next_power_of_2(dims),
            BLOCK_R=triton.next_power_of_2(self.table.shape[1] // 2),
            num_warps=4,
            **dependent_launch(query.device),
        )
        return stored[0].to(query.dtype), stored[1].to(key.dtype)


@triton.jit
def _mla_query_key_kernel(
    absorbed,  # [T, H, L]
    rotated,  # [T, H, R]
    latent,  # [T, L + R]
    norm,  # [L]
    positions,  # int64 [T]
    table,  # fp32 [max_positions, R]
    query,  # out: [T, H, L + R]
    key,  # out: [T, 1, L + R]
    absorbed_stride,  # of a token
    absorbed_head_stride,
    rotated_stride,  # of a token
    rotated_head_stride,
    latent_stride,  # of a token
    eps,
    heads,  # H
    DIMS: tl.constexpr,  # L
    ROTARY: tl.constexpr,  # R
    BLOCK: tl.constexpr,  # L, rounded up to a power of two
    BLOCK_R: tl.constexpr,  # R / 2, likewise
    PDL: tl.constexpr,
):
    """One head of a token's query, or after the last of them its key."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < DIMS
    if head < heads:
        to = query + (token * heads + head) * (DIMS + ROTARY)
        of_query = absorbed + token * absorbed_stride + head * absorbed_head_stride
        tl.store(to + column, tl.load(of_query + column, mask=inside).to(query.dtype.element_ty), mask=inside)
        _turn(
            rotated + token * rotated_stride + head * rotated_head_stride,
            positions + token,
            table,
            to + DIMS,
            ROTARY,
            BLOCK_R,
        )
    else:
        to = key + token * (DIMS + ROTARY)
        of_key = latent + token * latent_stride
        wide = tl.load(of_key + column, mask=inside, other=0.0).to(tl.float32)
        wide *= tl.rsqrt(tl.sum(wide * wide, 0) / DIMS + eps)
        wide *= tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(to + column, wide.to(key.dtype.element_ty), mask=inside)
        _turn(of_key + DIMS, positions + token, table, to + DIMS, ROTARY, BLOCK_R)


@triton.jit
def _turn(
    source,  # [R], where its dims start
    position,  # int64, where it is stored
    table,  # fp32 [max_positions, R]
    to,  # out: [R], where the rotated dims start
    ROTARY: tl.constexpr,  # R
    BLOCK_R: tl.constexpr,
):
    """Rotate ROTARY dims, pairs of adjacent ones, by the angles of a position."""
    pair = tl.arange(0, BLOCK_R)
    inside = pair < ROTARY // 2
    angle = table + tl.load(position) * ROTARY + pair
    cos = tl.load(angle, mask=inside, other=0.0)
    sin = tl.load(angle + ROTARY // 2, mask=inside, other=0.0)
    even = tl.load(source + 2 * pair, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(source + 2 * pair + 1, mask=inside, other=0.0).to(tl.float32)
    tl.store(to + 2 * pair, (even * cos - odd * sin).to(to.dtype.element_ty), mask=inside)
    tl.store(to + 2 * pair + 1, (odd * cos + even * sin).to(to.dtype.element_ty), mask=inside)


_mla_query_key = define_op("spec_decode::mla_query_key", MlaQueryKey)
