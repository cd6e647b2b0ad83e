"""Rotary embedding of queries and keys fused with the write of keys and values to the paged cache, in one kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attn_backends.kernels.e4m3 import as_bytes
from attn_backends.kernels.rope import Rope, angles_of, check_rope, rope_formula, rotated_pairs
from attn_backends.kernels.write_kv import NO_SCALES, Scales, WriteKV, check_new_kv, quantised
from builders.errors import BatchError, require_tensor
from builders.kernels.op import define_op
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


def rope_and_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rope: Rope,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: Scales | None = None,
) -> None:
    """Apply `apply_rope` to query in place and to a copy of key, and `write_kv` to that copy and value. Same results.

    query         [num_tokens, num_q_heads, D]
    key           [num_tokens, num_kv_heads, D]; key and value can be views of one packed projection
    value         [num_tokens, num_kv_heads, value_dim]
    key_cache, value_cache, slot_mapping, scales: see `write_kv`

    Raises BatchError, and changes nothing, for tensors that a kernel would misread.
    """
    tokens, _, dim = key.shape
    check_new_kv(key, value, key_cache, value_cache, slot_mapping, scales)
    require_tensor("query", query, shape=(tokens, None, dim), dtype=key.dtype, device=key.device)
    check_rope(query, rope)
    if query.shape[1] % key.shape[1]:
        raise BatchError(
            f"query heads must be a multiple of {key.shape[1]}, got {query.shape[1]}; a kernel would skip heads. Pass "
            "whole groups."
        )
    _op(query, key, value, *rope, key_cache, value_cache, slot_mapping, *(scales or NO_SCALES))


class _RopeAndWriteKV(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    positions: torch.Tensor
    table: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slot_mapping: torch.Tensor
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None

    def reference(self) -> None:
        rope = Rope(self.positions, self.table)
        self.query.copy_(rope_formula(self.query, rope))
        key = rope_formula(self.key, rope)
        WriteKV(key, self.value, *self[5:]).reference()

    def launch(self) -> None:
        query, key, value = self.query, self.key, self.value
        key_cache, value_cache = as_bytes(self.key_cache), as_bytes(self.value_cache)
        tokens, heads, dim = key.shape
        group, value_dim = query.shape[1] // heads, value.shape[2]
        _rope_and_write_kv_kernel[(tokens, heads)](
            q_ptr=self.query,
            k_ptr=self.key,
            v_ptr=self.value,
            positions_ptr=self.positions,
            cos_sin_ptr=self.table,
            k_cache_ptr=key_cache,
            v_cache_ptr=value_cache,
            slot_mapping_ptr=self.slot_mapping,
            k_scale_ptr=self.key_scale,
            v_scale_ptr=self.value_scale,
            stride_q_token=query.stride(0),
            stride_q_head=query.stride(1),
            stride_k_token=key.stride(0),
            stride_k_head=key.stride(1),
            stride_v_token=value.stride(0),
            stride_v_head=value.stride(1),
            stride_kc_page=key_cache.stride(0),
            stride_kc_token=key_cache.stride(1),
            stride_kc_head=key_cache.stride(2),
            stride_vc_page=value_cache.stride(0),
            stride_vc_token=value_cache.stride(1),
            stride_vc_head=value_cache.stride(2),
            num_slots=key_cache.shape[0] * key_cache.shape[1],
            GROUP=group,
            PAGE_SIZE=key_cache.shape[1],
            HALF_DIM=dim // 2,
            VALUE_DIM=value_dim,
            BLOCK_G=next_power_of_2(group),
            BLOCK_D=next_power_of_2(dim // 2),
            BLOCK_DV=next_power_of_2(value_dim),
            QUANTISE=self.key_scale is not None,
            HEAD_SCALES=self.key_scale is not None and len(self.key_scale) > 1,
            num_warps=1 if group * dim <= 1024 else 4,
            **dependent_launch(key.device),
        )


@triton.jit
def _rope_and_write_kv_kernel(
    q_ptr,  # in and out: [num_tokens, num_q_heads, D]
    k_ptr,  # [num_tokens, num_kv_heads, D]
    v_ptr,  # [num_tokens, num_kv_heads, value_dim]
    positions_ptr,  # int64 [num_tokens]
    cos_sin_ptr,  # fp32 [max_positions, D]
    k_cache_ptr,  # out: [pages, page_size, num_kv_heads, D]
    v_cache_ptr,  # out: [pages, page_size, num_kv_heads, value_dim]
    slot_mapping_ptr,  # int64 [num_tokens]
    k_scale_ptr,  # fp32 [1] or [num_kv_heads]; None unless QUANTISE
    v_scale_ptr,  # likewise
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_kc_page,
    stride_kc_token,
    stride_kc_head,
    stride_vc_page,
    stride_vc_token,
    stride_vc_head,
    num_slots,  # pages * page_size
    GROUP: tl.constexpr,  # query heads per KV head
    PAGE_SIZE: tl.constexpr,
    HALF_DIM: tl.constexpr,  # D / 2
    VALUE_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,  # GROUP, rounded up to a power of two
    BLOCK_D: tl.constexpr,  # D / 2, likewise
    BLOCK_DV: tl.constexpr,  # value_dim, likewise
    QUANTISE: tl.constexpr,  # whether the caches are bytes of e4m3
    HEAD_SCALES: tl.constexpr,  # whether each head has scales of its own
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """q and k rotated as in `_rope_kernel`; q is stored in place, k and v in their slot.

    Grid [num_tokens, num_kv_heads]. One program per token and KV head, with the query heads of its group.
    """
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    has_slot = (slot >= 0) & (slot < num_slots)
    offs_g = tl.arange(0, BLOCK_G)[:, None]
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    offs_dv = tl.arange(0, BLOCK_DV)
    mask_d = offs_d < HALF_DIM
    mask_q = mask_d & (offs_g < GROUP)
    # 1. Rotate q and k
    cos, sin = angles_of(cos_sin_ptr, tl.load(positions_ptr + token), offs_d, HALF_DIM)
    q_ptrs = q_ptr + token * stride_q_token + (kv_head * GROUP + offs_g) * stride_q_head + offs_d
    q1, q2 = rotated_pairs(q_ptrs, mask_q, cos, sin, HALF_DIM)
    k_ptrs = k_ptr + token * stride_k_token + kv_head * stride_k_head + offs_d
    k1, k2 = rotated_pairs(k_ptrs, mask_d, cos, sin, HALF_DIM)
    mask_v = offs_dv < VALUE_DIM
    v = tl.load(v_ptr + token * stride_v_token + kv_head * stride_v_head + offs_dv, mask=mask_v)
    if QUANTISE:
        k_scale = tl.load(k_scale_ptr + kv_head * HEAD_SCALES)
        k1, k2 = quantised(k1, k_scale), quantised(k2, k_scale)
        v = quantised(v, tl.load(v_scale_ptr + kv_head * HEAD_SCALES))
    # 2. Store q in place, k and v in the slot
    tl.store(q_ptrs, q1, mask=mask_q)
    tl.store(q_ptrs + HALF_DIM, q2, mask=mask_q)
    page = slot // PAGE_SIZE
    page_offset = slot % PAGE_SIZE
    kc_ptrs = k_cache_ptr + page * stride_kc_page + page_offset * stride_kc_token + kv_head * stride_kc_head + offs_d
    tl.store(kc_ptrs, k1, mask=mask_d & has_slot)
    tl.store(kc_ptrs + HALF_DIM, k2, mask=mask_d & has_slot)
    vc_ptrs = v_cache_ptr + page * stride_vc_page + page_offset * stride_vc_token + kv_head * stride_vc_head + offs_dv
    tl.store(vc_ptrs, v, mask=mask_v & has_slot)


_op = define_op("attn_backends::rope_and_write_kv", _RopeAndWriteKV, mutates=("query", "key_cache", "value_cache"))
