"""Assemble the query and the key of multi-head latent attention from their parts in one kernel.

Legend: T tokens, H heads, L dims of the latent, R rotary dims. All floats have one dtype; computation is in fp32 and
rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from attn_backends.kernels.latent_rotary import check_rotary, turned
from attn_backends.kernels.rope import Rope
from builders.errors import require, require_tensor, require_vector
from builders.kernels.op import define_op
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, stored_as, tl, triton


def mla_query_key(
    absorbed: torch.Tensor,
    rotated: torch.Tensor,
    latent: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    rope: Rope,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the query [T, H, L + R], absorbed | rotated part, and the key [T, 1, L + R], normed latent | rotated part.

    absorbed  [T, H, L], the query without positions, times the latent's projection to keys
    rotated   [T, H, R], the part of the query to rotate
    latent    [T, L + R] as projected: the latent, and the part of the key to rotate
    norm      [L], the weight of the latent's RMS norm with eps

    All but norm are contiguous in their last dim. Raises BatchError for tensors that do not fit, before any launch.
    """
    (tokens, heads, dims), rotary = absorbed.shape, rope.table.shape[1]
    device, dtype = absorbed.device, absorbed.dtype
    require_tensor("rotated", rotated, shape=(tokens, heads, rotary), dtype=dtype, device=device)
    require_tensor("latent", latent, shape=(tokens, dims + rotary), dtype=dtype, device=device)
    require_vector("norm", norm, length=dims, dtype=norm.dtype, device=device)
    check_rotary(latent, *rope)
    require(
        absorbed.stride(2) == rotated.stride(2) == latent.stride(1) == 1,
        f"absorbed, rotated and latent must be contiguous in their last dim, got strides {absorbed.stride()}, "
        f"{rotated.stride()} and {latent.stride()}. Make them contiguous.",
    )
    arguments = MlaQueryKey(absorbed, rotated, latent, norm, *rope, eps)
    if any(each.requires_grad for each in (absorbed, rotated, latent, norm)):
        return arguments.reference()
    return _mla_query_key(*arguments)


class MlaQueryKey(NamedTuple):
    """The arguments of `mla_query_key`."""

    absorbed: torch.Tensor
    rotated: torch.Tensor
    latent: torch.Tensor
    norm: torch.Tensor
    positions: torch.Tensor
    table: torch.Tensor
    eps: float

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, dims = self.latent.dtype, self.absorbed.shape[2]
        rotated = turned(self.rotated.float(), self.positions, self.table).to(dtype)
        latent, shared = self.latent.float().split([dims, self.table.shape[1]], -1)
        normed = F.rms_norm(latent, (dims,), self.norm.float(), self.eps)
        key = torch.cat([normed, turned(shared, self.positions, self.table)], -1).to(dtype)
        return torch.cat([self.absorbed, rotated], -1), key[:, None]

    def fake(self) -> tuple[torch.Tensor, torch.Tensor]:
        (tokens, heads, _), width = self.absorbed.shape, self.latent.shape[1]
        return self.latent.new_empty(tokens, heads, width), self.latent.new_empty(tokens, 1, width)

    def launch(self) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, heads, dims = self.absorbed.shape
        query, key = self.fake()
        stored = stored_as(query), stored_as(key)
        _mla_query_key_kernel[(tokens, heads + 1)](
            ql_nope_ptr=self.absorbed,
            q_pe_ptr=self.rotated,
            kv_ptr=self.latent,
            norm_ptr=self.norm,
            positions_ptr=self.positions,
            cos_sin_ptr=self.table,
            q_ptr=stored[0],
            k_ptr=stored[1],
            stride_ql_token=self.absorbed.stride(0),
            stride_ql_head=self.absorbed.stride(1),
            stride_qpe_token=self.rotated.stride(0),
            stride_qpe_head=self.rotated.stride(1),
            stride_kv_token=self.latent.stride(0),
            eps=self.eps,
            num_heads=heads,
            LATENT_DIM=dims,
            ROPE_DIM=self.table.shape[1],
            BLOCK_D=next_power_of_2(dims),
            BLOCK_R=next_power_of_2(self.table.shape[1] // 2),
            num_warps=4,
            **dependent_launch(query.device),
        )
        return stored[0].to(query.dtype), stored[1].to(key.dtype)


@triton.jit
def _mla_query_key_kernel(
    ql_nope_ptr,  # [T, H, L]
    q_pe_ptr,  # [T, H, R]
    kv_ptr,  # [T, L + R]
    norm_ptr,  # [L]
    positions_ptr,  # int64 [T]
    cos_sin_ptr,  # fp32 [max_positions, R]
    q_ptr,  # out: [T, H, L + R]
    k_ptr,  # out: [T, 1, L + R]
    stride_ql_token,
    stride_ql_head,
    stride_qpe_token,
    stride_qpe_head,
    stride_kv_token,
    eps,
    num_heads,  # H
    LATENT_DIM: tl.constexpr,  # L
    ROPE_DIM: tl.constexpr,  # R
    BLOCK_D: tl.constexpr,  # L, rounded up to a power of two
    BLOCK_R: tl.constexpr,  # R / 2, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Write one head of a token's query or, after the last head, its key. Grid [T, H + 1]."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    mask = offs_d < LATENT_DIM
    if head < num_heads:
        out_ptrs = q_ptr + (token * num_heads + head) * (LATENT_DIM + ROPE_DIM)
        # The query: ql_nope | rope(q_pe)
        ql_ptrs = ql_nope_ptr + token * stride_ql_token + head * stride_ql_head
        tl.store(out_ptrs + offs_d, tl.load(ql_ptrs + offs_d, mask=mask).to(q_ptr.dtype.element_ty), mask=mask)
        _rotate(
            q_pe_ptr + token * stride_qpe_token + head * stride_qpe_head,
            positions_ptr + token,
            cos_sin_ptr,
            out_ptrs + LATENT_DIM,
            ROPE_DIM,
            BLOCK_R,
        )
    else:
        out_ptrs = k_ptr + token * (LATENT_DIM + ROPE_DIM)
        # The key: norm(kv) | rope(kv's last dims)
        kv_ptrs = kv_ptr + token * stride_kv_token
        x = tl.load(kv_ptrs + offs_d, mask=mask, other=0.0).to(tl.float32)
        x *= tl.rsqrt(tl.sum(x * x, 0) / LATENT_DIM + eps)
        x *= tl.load(norm_ptr + offs_d, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptrs + offs_d, x.to(k_ptr.dtype.element_ty), mask=mask)
        _rotate(kv_ptrs + LATENT_DIM, positions_ptr + token, cos_sin_ptr, out_ptrs + LATENT_DIM, ROPE_DIM, BLOCK_R)


@triton.jit
def _rotate(
    x_ptr,  # [R], the dims to rotate
    position_ptr,  # int64, one element
    cos_sin_ptr,  # fp32 [max_positions, R]
    out_ptr,  # out: [R]
    ROPE_DIM: tl.constexpr,  # R
    BLOCK_R: tl.constexpr,
):
    """Rotate ROPE_DIM dims, as adjacent pairs, by the angles of a position."""
    pair = tl.arange(0, BLOCK_R)
    mask = pair < ROPE_DIM // 2
    cos_ptrs = cos_sin_ptr + tl.load(position_ptr) * ROPE_DIM + pair
    cos = tl.load(cos_ptrs, mask=mask, other=0.0)
    sin = tl.load(cos_ptrs + ROPE_DIM // 2, mask=mask, other=0.0)
    even = tl.load(x_ptr + 2 * pair, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(x_ptr + 2 * pair + 1, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + 2 * pair, (even * cos - odd * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptr + 2 * pair + 1, (odd * cos + even * sin).to(out_ptr.dtype.element_ty), mask=mask)


_mla_query_key = define_op("spec_decode::mla_query_key", MlaQueryKey)
