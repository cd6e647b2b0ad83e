"""The write of new keys and values to the paged cache."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch

from attn_backends.kernels.e4m3 import as_bytes, e4m3_byte, to_e4m3
from builders.errors import BatchError, require_tensor, require_vector
from builders.kernels.op import define_op
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton

Scales: TypeAlias = tuple[torch.Tensor, torch.Tensor]
NO_SCALES = None, None
_QUANTISED = (torch.bfloat16, torch.float16, torch.float32)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: Scales | None = None,
) -> None:
    """Set cache[slot // page_size, slot % page_size] = new, for every token whose slot is in the cache.

    key           [num_tokens, heads, dim], with any strides but a contiguous last dim
    value         [num_tokens, heads, value_dim], likewise
    key_cache     [pages, page_size, heads, dim], likewise
    value_cache   [pages, page_size, heads, value_dim], likewise
    slot_mapping  int64 [num_tokens]; a slot below 0 or beyond the last page writes nothing
    scales        of an e4m3 cache: for keys and for values, fp32 [1] or [heads] each

    Keys and values have the cache's dtype, or for an e4m3 cache a wider one: they are divided by their scale, clamped
    to its range of 448 and rounded to nearest; NaN stays NaN. Raises BatchError, and writes nothing, for tensors that
    do not fit.
    """
    check_new_kv(key, value, key_cache, value_cache, slot_mapping, scales)
    _write_kv(key, value, key_cache, value_cache, slot_mapping, *(scales or NO_SCALES))


def check_new_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: Scales | None,
) -> None:
    """Raise BatchError for keys, values, slots and scales that do not fit the caches as `write_kv` requires."""
    num_tokens, (_, _, heads, dim) = slot_mapping.shape[0], key_cache.shape
    quantise = key_cache.dtype is torch.float8_e4m3fn
    dtype = key.dtype if quantise and key.dtype in _QUANTISED else torch.bfloat16 if quantise else key_cache.dtype
    _check_scales(key_cache, scales)
    require_tensor("key", key, shape=(num_tokens, heads, dim), dtype=dtype, device=key_cache.device)
    shape = (num_tokens, heads, value_cache.shape[3])
    require_tensor("value", value, shape=shape, dtype=dtype, device=value_cache.device)
    require_vector("slot_mapping", slot_mapping, length=num_tokens, dtype=torch.int64, device=key_cache.device)
    if not key.stride(2) == value.stride(2) == key_cache.stride(3) == value_cache.stride(3) == 1:
        raise BatchError(
            f"the last dim of keys, values and their caches must be contiguous, got strides {key.stride()}, "
            f"{value.stride()}, {key_cache.stride()} and {value_cache.stride()}; a kernel would misread them. Keep the "
            "head dim innermost."
        )


def _check_scales(cache: torch.Tensor, scales: Scales | None) -> None:
    """Raise BatchError unless there are scales exactly if the cache is e4m3, and they fit it."""
    if (scales is not None) != (cache.dtype is torch.float8_e4m3fn):
        raise BatchError(
            f"an e4m3 cache, and no other, has scales, got a cache of {cache.dtype} with "
            f"{'none' if scales is None else 'some'}; its numbers would mean something else when read. Set "
            "KVCache.scales for such a cache only, for example to KVScales.ones."
        )
    for name, scale in zip(("key scales", "value scales"), scales or (), strict=bool(scales)):
        length = cache.shape[2] if len(scale) > 1 else 1
        require_vector(f"the {name}", scale, length=length, dtype=torch.float32, device=cache.device)


class WriteKV(NamedTuple):
    """The arguments of `write_kv`."""

    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slot_mapping: torch.Tensor
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None

    def reference(self) -> None:
        key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale = self
        page_size = key_cache.shape[1]
        written = (slot_mapping >= 0) & (slot_mapping < key_cache.shape[0] * page_size)
        slots = slot_mapping[written]
        if key_scale is not None and value_scale is not None:
            key, value = to_e4m3(key.float() / key_scale[:, None]), to_e4m3(value.float() / value_scale[:, None])
        key_cache[slots // page_size, slots % page_size] = key[written]
        value_cache[slots // page_size, slots % page_size] = value[written]

    def launch(self) -> None:
        key, value, slot_mapping = self.key, self.value, self.slot_mapping
        key_cache, value_cache = as_bytes(self.key_cache), as_bytes(self.value_cache)
        pages, page_size, heads, dim = key_cache.shape
        value_dim = value_cache.shape[3]
        _write_kv_kernel[(slot_mapping.shape[0],)](
            k_ptr=key,
            v_ptr=value,
            k_cache_ptr=key_cache,
            v_cache_ptr=value_cache,
            slot_mapping_ptr=slot_mapping,
            k_scale_ptr=self.key_scale,
            v_scale_ptr=self.value_scale,
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
            num_slots=pages * page_size,
            PAGE_SIZE=page_size,
            HEADS=heads,
            HEAD_DIM=dim,
            VALUE_DIM=value_dim,
            BLOCK_H=next_power_of_2(heads),
            BLOCK_D=next_power_of_2(max(dim, value_dim)),
            QUANTISE=self.key_scale is not None,
            HEAD_SCALES=self.key_scale is not None and len(self.key_scale) > 1,
            num_warps=1 if heads * dim <= 512 else 4,
            **dependent_launch(key.device),
        )


@triton.jit
def _write_kv_kernel(
    k_ptr,  # [num_tokens, heads, dim]
    v_ptr,  # [num_tokens, heads, value_dim]
    k_cache_ptr,  # out: [pages, page_size, heads, dim]
    v_cache_ptr,  # out: [pages, page_size, heads, value_dim]
    slot_mapping_ptr,  # int64 [num_tokens]
    k_scale_ptr,  # fp32 [1] or [heads]; None unless QUANTISE
    v_scale_ptr,  # likewise
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
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,  # heads, rounded up to a power of two
    BLOCK_D: tl.constexpr,  # the wider of dim and value_dim, likewise
    QUANTISE: tl.constexpr,  # whether the caches are bytes of e4m3
    HEAD_SCALES: tl.constexpr,  # whether each head has scales of its own
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """k_cache[page, offset] = k, v_cache[page, offset] = v by slot page * PAGE_SIZE + offset. One program per token."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if (slot >= 0) & (slot < num_slots):
        page = slot // PAGE_SIZE
        page_offset = slot % PAGE_SIZE
        head = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]
        offs_d = tl.arange(0, BLOCK_D)[None, :]
        mask_k = (head < HEADS) & (offs_d < HEAD_DIM)
        k = tl.load(k_ptr + token * stride_k_token + head * stride_k_head + offs_d, mask=mask_k)
        if QUANTISE:
            k = quantised(k, tl.load(k_scale_ptr + head * HEAD_SCALES, mask=head < HEADS, other=1.0))
        k_offs = page * stride_kc_page + page_offset * stride_kc_token + head * stride_kc_head + offs_d
        tl.store(k_cache_ptr + k_offs, k, mask=mask_k)
        mask_v = (head < HEADS) & (offs_d < VALUE_DIM)
        v = tl.load(v_ptr + token * stride_v_token + head * stride_v_head + offs_d, mask=mask_v)
        if QUANTISE:
            v = quantised(v, tl.load(v_scale_ptr + head * HEAD_SCALES, mask=head < HEADS, other=1.0))
        v_offs = page * stride_vc_page + page_offset * stride_vc_token + head * stride_vc_head + offs_d
        tl.store(v_cache_ptr + v_offs, v, mask=mask_v)


@triton.jit
def quantised(new, scale):
    """Return the bytes of e4m3 that hold new numbers over their scale."""
    return e4m3_byte(tl.div_rn(new.to(tl.float32), scale))


_write_kv = define_op("attn_backends::write_kv", WriteKV, mutates=("key_cache", "value_cache"))
