"""Store new keys and values in the paged cache."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attn_backends.kernels.e4m3 import e4m3_byte, to_e4m3
from builders.errors import require_tensor
from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton

_QUANTISED = (torch.bfloat16, torch.float16, torch.float32)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """cache[slot // page_size, slot % page_size] = new, for every token whose slot is one of the cache.

    key           [num_tokens, heads, dim]
    value         [num_tokens, heads, value_dim]
    key_cache     [pages, page_size, heads, dim], with strides of its own
    value_cache   [pages, page_size, heads, value_dim], likewise
    slot_mapping  int64 [num_tokens]; a slot below 0 or beyond the last page writes nothing

    Keys and values have the cache's dtype. Into a cache of e4m3 they may be wider: they are clamped to its range and
    rounded to nearest, unscaled. Raises BatchError for keys or values that do not fit.
    """
    check_new_kv(key, value, key_cache, value_cache, slot_mapping.shape[0])
    _write_kv(key, value, key_cache, value_cache, slot_mapping)


def check_new_kv(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, num_tokens: int
) -> None:
    """Raise BatchError for keys and values of num_tokens tokens that do not fit the caches as `write_kv` says."""
    _, _, heads, dim = key_cache.shape
    quantise = key_cache.dtype is torch.float8_e4m3fn and key.dtype in _QUANTISED
    dtype = key.dtype if quantise else key_cache.dtype
    require_tensor("key", key, shape=(num_tokens, heads, dim), dtype=dtype, device=key_cache.device)
    shape = (num_tokens, heads, value_cache.shape[3])
    require_tensor("value", value, shape=shape, dtype=dtype, device=value_cache.device)


class WriteKV(NamedTuple):
    """As `write_kv` has them."""

    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slot_mapping: torch.Tensor

    def reference(self) -> None:
        key, value, key_cache, value_cache, slot_mapping = self
        page_size = key_cache.shape[1]
        written = (slot_mapping >= 0) & (slot_mapping < key_cache.shape[0] * page_size)
        slots = slot_mapping[written]
        if key.dtype != key_cache.dtype:
            key, value = to_e4m3(key), to_e4m3(value)
        key_cache[slots // page_size, slots % page_size] = key[written]
        value_cache[slots // page_size, slots % page_size] = value[written]

    def launch(self) -> None:
        key, value, key_cache, value_cache, slot_mapping = self
        pages, page_size, heads, dim = key_cache.shape
        value_dim = value_cache.shape[3]
        _write_kv_kernel[(slot_mapping.shape[0],)](
            *self,
            *key.stride()[:2],
            *value.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            pages * page_size,
            PAGE_SIZE=page_size,
            HEADS=heads,
            DIM=dim,
            VALUE_DIM=value_dim,
            BLOCK_H=triton.next_power_of_2(heads),
            BLOCK_D=triton.next_power_of_2(max(dim, value_dim)),
            QUANTISE=key.dtype != key_cache.dtype,
            num_warps=1 if heads * dim <= 512 else 4,
            **dependent_launch(key.device),
        )


@triton.jit
def _write_kv_kernel(
    key,  # [num_tokens, heads, dim]
    value,  # [num_tokens, heads, value_dim]
    key_cache,  # out: [pages, page_size, heads, dim]
    value_cache,  # out: [pages, page_size, heads, value_dim]
    slot_mapping,  # int64 [num_tokens]
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
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,  # heads, rounded up to a power of two
    BLOCK_D: tl.constexpr,  # the wider of dim and value_dim, likewise
    QUANTISE: tl.constexpr,  # whether the caches are e4m3 and key and value wider
    PDL: tl.constexpr,
):
    """One program writes all heads of one token."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if (slot >= 0) & (slot < num_slots):
        page = slot // PAGE_SIZE
        offset = slot % PAGE_SIZE
        head = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]
        dim = tl.arange(0, BLOCK_D)[None, :]
        in_key = (head < HEADS) & (dim < DIM)
        new_key = tl.load(key + token * key_token_stride + head * key_head_stride + dim, mask=in_key)
        if QUANTISE:
            new_key = quantised(new_key, key_cache)
        key_at = page * kc_page_stride + offset * kc_token_stride + head * kc_head_stride + dim
        tl.store(key_cache + key_at, new_key, mask=in_key)
        in_value = (head < HEADS) & (dim < VALUE_DIM)
        new_value = tl.load(value + token * value_token_stride + head * value_head_stride + dim, mask=in_value)
        if QUANTISE:
            new_value = quantised(new_value, value_cache)
        value_at = page * vc_page_stride + offset * vc_token_stride + head * vc_head_stride + dim
        tl.store(value_cache + value_at, new_value, mask=in_value)


@triton.jit
def quantised(new, cache):
    """New values as a cache of e4m3 holds them."""
    return e4m3_byte(new.to(tl.float32)).to(cache.dtype.element_ty, bitcast=True)


_write_kv = define_op("attn_backends::write_kv", WriteKV, mutates=("key_cache", "value_cache"))
