"""After a tree was verified: the accepted tokens' keys and values move to where a text without the others has them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.errors import require, require_tensor
from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


def move_accepted_kv(
    key_cache: torch.Tensor, value_cache: torch.Tensor, slot_mapping: torch.Tensor, path: torch.Tensor
) -> None:
    """Copy key and value of the i-th accepted token into the slot of query token i, of one layer, in place.

    key_cache     [pages, page_size, heads, dim], with strides of its own
    value_cache   [pages, page_size, heads, value_dim], likewise
    slot_mapping  int64 [R, 1 + N], the slots of each row's query tokens, no two the same; below 0 or beyond the last
                  page nothing is read or written
    path          int64 [R, K], as TreeVerifyOutput has it; what is no query token moves nothing

    Device work only, no host read. Raises BatchError for caches of unlike sizes, a path as long as the
    tree, and for tensors of another shape, dtype or device.
    """
    pages, page_size, heads, _ = key_cache.shape
    device = key_cache.device
    shape = (pages, page_size, heads, None)
    require_tensor("value_cache", value_cache, shape=shape, dtype=key_cache.dtype, device=device)
    require_tensor("path", path, shape=(None, None), dtype=torch.int64, device=device)
    require_tensor("slot_mapping", slot_mapping, shape=(len(path), None), dtype=torch.int64, device=device)
    require(
        path.shape[1] < slot_mapping.shape[1],
        f"a path must be shorter than its tree has query tokens, {slot_mapping.shape[1]}, got room for "
        f"{path.shape[1]}; its last tokens would have no slot. Pass the tree's own slots and "
        "path.",
    )
    _move_accepted_kv(key_cache, value_cache, slot_mapping.contiguous(), path.contiguous())


class MoveAcceptedKV(NamedTuple):
    """As `move_accepted_kv` has them."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slot_mapping: torch.Tensor
    path: torch.Tensor

    def reference(self) -> None:
        key_cache, value_cache, slot_mapping, path = self
        page_size = key_cache.shape[1]
        num_slots = key_cache.shape[0] * page_size
        # In order: a later token comes from behind where an earlier one goes.
        for at, token in enumerate(path.unbind(1), 1):
            known = (token > 0) & (token < slot_mapping.shape[1])
            source, target = slot_mapping.gather(1, (token * known)[:, None])[:, 0], slot_mapping[:, at]
            moved = known & (source >= 0) & (source < num_slots) & (target >= 0) & (target < num_slots)
            source, target = source[moved], target[moved]
            for cache in (key_cache, value_cache):
                cache[target // page_size, target % page_size] = cache[source // page_size, source % page_size]

    def launch(self) -> None:
        key_cache, value_cache, slot_mapping, path = self
        pages, page_size, heads, dim = key_cache.shape
        value_dim = value_cache.shape[3]
        _move_accepted_kv_kernel[(len(path), heads)](
            *self,
            *key_cache.stride(),
            *value_cache.stride(),
            slot_mapping.shape[1],
            path.shape[1],
            pages * page_size,
            PAGE_SIZE=page_size,
            DIM=dim,
            VALUE_DIM=value_dim,
            BLOCK=triton.next_power_of_2(max(dim, value_dim)),
            num_warps=1,
            **dependent_launch(key_cache.device),
        )


@triton.jit
def _move_accepted_kv_kernel(
    key_cache,  # in and out: [pages, page_size, heads, dim]
    value_cache,  # in and out: [pages, page_size, heads, value_dim]
    slot_mapping,  # int64 [R, 1 + N]
    path,  # int64 [R, K]
    key_page_stride,
    key_token_stride,
    key_head_stride,
    key_dim_stride,
    value_page_stride,
    value_token_stride,
    value_head_stride,
    value_dim_stride,
    tokens,  # 1 + N
    depth,  # K
    num_slots,  # pages * page_size
    PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of a row. A thread reads what it wrote itself, so that the order of the path is kept."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    dim = tl.arange(0, BLOCK).to(tl.int64)
    key = key_cache + head * key_head_stride + dim * key_dim_stride
    value = value_cache + head * value_head_stride + dim * value_dim_stride
    for at in range(0, depth):
        token = tl.load(path + row * depth + at)
        if (token > 0) & (token < tokens):
            source = tl.load(slot_mapping + row * tokens + token)
            target = tl.load(slot_mapping + row * tokens + at + 1)
            if (source >= 0) & (source < num_slots) & (target >= 0) & (target < num_slots):
                source_page, source_at = source // PAGE_SIZE, source % PAGE_SIZE
                page, offset = target // PAGE_SIZE, target % PAGE_SIZE
                moved = tl.load(key + source_page * key_page_stride + source_at * key_token_stride, mask=dim < DIM)
                tl.store(key + page * key_page_stride + offset * key_token_stride, moved, mask=dim < DIM)
                moved = tl.load(
                    value + source_page * value_page_stride + source_at * value_token_stride, mask=dim < VALUE_DIM
                )
                tl.store(value + page * value_page_stride + offset * value_token_stride, moved, mask=dim < VALUE_DIM)


_move_accepted_kv = define_op("spec_decode::move_accepted_kv", MoveAcceptedKV, mutates=("key_cache", "value_cache"))
