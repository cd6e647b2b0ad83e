"""Rotary embedding of queries and keys, and the write of keys and values to the paged cache, in one kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attn_backends.kernels.rope import Rope, angles_of, rope_formula, rotated_pairs
from attn_backends.kernels.write_kv import WriteKV, check_new_kv, quantised
from builders.errors import require, require_tensor
from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


def rope_and_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rope: Rope,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`apply_rope` to query in place and to a copy of key; `write_kv` that copy and value. The numbers are the same.

    query         [num_tokens, num_q_heads, D]
    key           [num_tokens, num_kv_heads, D]; key and value may be views of one packed projection
    value         [num_tokens, num_kv_heads, value_dim]
    key_cache, value_cache, slot_mapping: see `write_kv`

    Raises BatchError, with nothing changed, for tensors that a kernel would misread.
    """
    tokens, _, dim = key.shape
    check_new_kv(key, value, key_cache, value_cache, slot_mapping.shape[0])
    device = key.device
    require_tensor("query", query, shape=(tokens, None, dim), dtype=key.dtype, device=device)
    require_tensor("positions", rope.positions, shape=(tokens,), dtype=torch.int64, device=device)
    require_tensor("the rotary table", rope.table, shape=(None, dim), dtype=torch.float32, device=device)
    contiguous = query.stride(2) == key.stride(2) == value.stride(2) == 1 and rope.table.is_contiguous()
    if not contiguous or query.shape[1] % key.shape[1]:
        require(
            False,
            f"query heads must be a multiple of {key.shape[1]} and every head's dims adjacent, got {query.shape[1]} "
            f"and strides {query.stride()}, {key.stride()}, {value.stride()}, table {rope.table.stride()}; a "
            "kernel would read other elements. Keep the head dim innermost.",
        )
    _op(query, key, value, *rope, key_cache, value_cache, slot_mapping)


class _RopeAndWriteKV(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    positions: torch.Tensor
    table: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slot_mapping: torch.Tensor

    def reference(self) -> None:
        rope = Rope(self.positions, self.table)
        self.query.copy_(rope_formula(self.query, rope))
        key = rope_formula(self.key, rope)
        WriteKV(key, self.value, self.key_cache, self.value_cache, self.slot_mapping).reference()

    def launch(self) -> None:
        query, key, value, key_cache, value_cache = self.query, self.key, self.value, self.key_cache, self.value_cache
        tokens, heads, dim = key.shape
        group, value_dim = query.shape[1] // heads, value.shape[2]
        _rope_and_write_kv_kernel[(tokens, heads)](
            *self,
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            key_cache.shape[0] * key_cache.shape[1],
            GROUP=group,
            PAGE_SIZE=key_cache.shape[1],
            HALF=dim // 2,
            VALUE_DIM=value_dim,
            BLOCK_G=triton.next_power_of_2(group),
            BLOCK_D=triton.next_power_of_2(dim // 2),
            BLOCK_E=triton.next_power_of_2(value_dim),
            QUANTISE=key.dtype != key_cache.dtype,
            num_warps=1 if group * dim <= 1024 else 4,
            **dependent_launch(key.device),
        )


@triton.jit
def _rope_and_write_kv_kernel(
    query,  # in and out: [num_tokens, num_q_heads, D]
    key,  # [num_tokens, num_kv_heads, D]
    value,  # [num_tokens, num_kv_heads, value_dim]
    positions,  # int64 [num_tokens]
    table,  # fp32 [max_positions, D]
    key_cache,  # out: [pages, page_size, num_kv_heads, D]
    value_cache,  # out: [pages, page_size, num_kv_heads, value_dim]
    slot_mapping,  # int64 [num_tokens]
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    kc_page_stride,
    kc_token_stride,
    kc_head_stride,
    vc_page_stride,
    vc_token_stride,
    vc_head_stride,
    num_slots,  # pages * page_size
    GROUP: tl.constexpr,  # query heads a KV head
    PAGE_SIZE: tl.constexpr,
    HALF: tl.constexpr,  # D / 2
    VALUE_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,  # GROUP, rounded up to a power of two
    BLOCK_D: tl.constexpr,  # D / 2, likewise
    BLOCK_E: tl.constexpr,  # value_dim, likewise
    QUANTISE: tl.constexpr,  # whether the caches are e4m3 and key and value wider
    PDL: tl.constexpr,
):
    """A program has one token and KV head, and the query heads of its group."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    in_cache = (slot >= 0) & (slot < num_slots)
    member = tl.arange(0, BLOCK_G)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    edim = tl.arange(0, BLOCK_E)
    in_half = dim < HALF
    in_group = in_half & (member < GROUP)
    # Rotate the queries and the key
    cos, sin = angles_of(table, tl.load(positions + token), dim, HALF)
    query_at = query + token * query_token_stride + (head * GROUP + member) * query_head_stride + dim
    query_first, query_second = rotated_pairs(query_at, in_group, cos, sin, HALF)
    key_at = key + token * key_token_stride + head * key_head_stride + dim
    key_first, key_second = rotated_pairs(key_at, in_half, cos, sin, HALF)
    in_value = edim < VALUE_DIM
    new_value = tl.load(value + token * value_token_stride + head * value_head_stride + edim, mask=in_value)
    if QUANTISE:
        key_first, key_second = quantised(key_first, key_cache), quantised(key_second, key_cache)
        new_value = quantised(new_value, value_cache)
    # Store the queries in place, key and value in the slot
    tl.store(query_at, query_first, mask=in_group)
    tl.store(query_at + HALF, query_second, mask=in_group)
    page = slot // PAGE_SIZE
    offset = slot % PAGE_SIZE
    kept = key_cache + page * kc_page_stride + offset * kc_token_stride + head * kc_head_stride + dim
    tl.store(kept, key_first, mask=in_half & in_cache)
    tl.store(kept + HALF, key_second, mask=in_half & in_cache)
    kept = value_cache + page * vc_page_stride + offset * vc_token_stride + head * vc_head_stride + edim
    tl.store(kept, new_value, mask=in_value & in_cache)


_op = define_op("attn_backends::rope_and_write_kv", _RopeAndWriteKV, mutates=("query", "key_cache", "value_cache"))
