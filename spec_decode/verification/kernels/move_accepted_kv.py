"""Compact the KV of a verified tree: move accepted keys and values to the slots that they would have in a chain."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attn_backends.kernels.e4m3 import as_bytes
from builders.errors import require, require_tensor
from builders.kernels.op import define_op
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


def move_accepted_kv(
    key_cache: torch.Tensor, value_cache: torch.Tensor, slot_mapping: torch.Tensor, path: torch.Tensor
) -> None:
    """Compact the accepted path's keys and values in one layer's cache, in place: those of the i-th accepted token move
    to the slot of query token i. The cache then looks as if no tree had been drafted.

    key_cache     [pages, page_size, heads, dim], any strides
    value_cache   [pages, page_size, heads, value_dim], any strides
    slot_mapping  int64 [R, 1 + N], the slots of each row's query tokens, all different; negative slots and slots past
                  the last page are neither read nor written
    path          int64 [R, K], from TreeVerifyOutput; a value that is not a query token moves nothing

    Device work only, no host sync. Raises BatchError for caches of different sizes, a path longer than the tree has
    draft tokens, and tensors of the wrong shape, dtype or device.
    """
    pages, page_size, heads, _ = key_cache.shape
    device = key_cache.device
    shape = (pages, page_size, heads, None)
    require_tensor("value_cache", value_cache, shape=shape, dtype=key_cache.dtype, device=device)
    require_tensor("path", path, shape=(None, None), dtype=torch.int64, device=device)
    require_tensor("slot_mapping", slot_mapping, shape=(len(path), None), dtype=torch.int64, device=device)
    require(
        path.shape[1] < slot_mapping.shape[1],
        f"path must have fewer columns than its tree has query tokens, {slot_mapping.shape[1]}, got "
        f"{path.shape[1]}; its last tokens would have no slot. Pass the tree's own slots and "
        "path.",
    )
    _move_accepted_kv(key_cache, value_cache, slot_mapping.contiguous(), path.contiguous())


class MoveAcceptedKV(NamedTuple):
    """The arguments of the op; move_accepted_kv documents them."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slot_mapping: torch.Tensor
    path: torch.Tensor

    def reference(self) -> None:
        key_cache, value_cache, slot_mapping, path = self
        page_size = key_cache.shape[1]
        num_slots = key_cache.shape[0] * page_size
        # In path order: a later token's source comes after every earlier target.
        for at, token in enumerate(path.unbind(1), 1):
            known = (token > 0) & (token < slot_mapping.shape[1])
            source, target = slot_mapping.gather(1, (token * known)[:, None])[:, 0], slot_mapping[:, at]
            moved = known & (source >= 0) & (source < num_slots) & (target >= 0) & (target < num_slots)
            source, target = source[moved], target[moved]
            for cache in (key_cache, value_cache):
                cache[target // page_size, target % page_size] = cache[source // page_size, source % page_size]

    def launch(self) -> None:
        slot_mapping, path = self.slot_mapping, self.path
        key_cache, value_cache = as_bytes(self.key_cache), as_bytes(self.value_cache)
        pages, page_size, heads, dim = key_cache.shape
        value_dim = value_cache.shape[3]
        _move_accepted_kv_kernel[(len(path), heads)](
            k_cache_ptr=key_cache,
            v_cache_ptr=value_cache,
            slot_mapping_ptr=self.slot_mapping,
            path_ptr=self.path,
            stride_k_page=key_cache.stride(0),
            stride_k_token=key_cache.stride(1),
            stride_k_head=key_cache.stride(2),
            stride_k_dim=key_cache.stride(3),
            stride_v_page=value_cache.stride(0),
            stride_v_token=value_cache.stride(1),
            stride_v_head=value_cache.stride(2),
            stride_v_dim=value_cache.stride(3),
            num_tokens=slot_mapping.shape[1],
            max_depth=path.shape[1],
            num_slots=pages * page_size,
            PAGE_SIZE=page_size,
            HEAD_DIM=dim,
            VALUE_DIM=value_dim,
            BLOCK_D=next_power_of_2(max(dim, value_dim)),
            num_warps=1,
            **dependent_launch(key_cache.device),
        )


@triton.jit
def _move_accepted_kv_kernel(
    k_cache_ptr,  # in and out: [pages, page_size, heads, dim]
    v_cache_ptr,  # in and out: [pages, page_size, heads, value_dim]
    slot_mapping_ptr,  # int64 [R, 1 + N]
    path_ptr,  # int64 [R, K]
    stride_k_page,
    stride_k_token,
    stride_k_head,
    stride_k_dim,
    stride_v_page,
    stride_v_token,
    stride_v_head,
    stride_v_dim,
    num_tokens,  # 1 + N
    max_depth,  # K
    num_slots,  # pages * page_size
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # the larger of both, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """kv[slot of query token i + 1] = kv[slot of path[i]], for one head of a row; grid [R, heads].

    A thread only reads what it wrote itself, so the moves happen in path order.
    """
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)
    k_ptrs = k_cache_ptr + head * stride_k_head + offs_d * stride_k_dim
    v_ptrs = v_cache_ptr + head * stride_v_head + offs_d * stride_v_dim
    for i in range(0, max_depth):
        query_token = tl.load(path_ptr + row * max_depth + i)
        if (query_token > 0) & (query_token < num_tokens):
            source = tl.load(slot_mapping_ptr + row * num_tokens + query_token)
            target = tl.load(slot_mapping_ptr + row * num_tokens + i + 1)
            if (source >= 0) & (source < num_slots) & (target >= 0) & (target < num_slots):
                source_page, source_offset = source // PAGE_SIZE, source % PAGE_SIZE
                target_page, target_offset = target // PAGE_SIZE, target % PAGE_SIZE
                k_source = k_ptrs + source_page * stride_k_page + source_offset * stride_k_token
                k_target = k_ptrs + target_page * stride_k_page + target_offset * stride_k_token
                tl.store(k_target, tl.load(k_source, mask=offs_d < HEAD_DIM), mask=offs_d < HEAD_DIM)
                v_source = v_ptrs + source_page * stride_v_page + source_offset * stride_v_token
                v_target = v_ptrs + target_page * stride_v_page + target_offset * stride_v_token
                tl.store(v_target, tl.load(v_source, mask=offs_d < VALUE_DIM), mask=offs_d < VALUE_DIM)


_move_accepted_kv = define_op("spec_decode::move_accepted_kv", MoveAcceptedKV, mutates=("key_cache", "value_cache"))
