"""Causal attention over a paged cache: one kernel for decode and extend, split over KV tokens, and the merge.

Shape legend: T query tokens, R requests, H query heads, K KV heads, G = H / K query heads a KV head, D head dim,
E value dim, S splits, M rows of a tile (query token x head of the group), N KV tokens of a block.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from attn_backends.kernels.paged_attention_kernels import attention_kernel, merge_kernel
from builders.kernels.op_by_schema import define_op_by_schema
from builders.kernels.triton_runtime import dependent_launch, triton
from builders.paged import num_sms


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    num_splits: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of query [T, H, D] over caches [pages, page_size, K, D or E]; returns [T, H, E] in query's dtype.

    Request r's queries are rows query_start_loc[r] .. query_start_loc[r + 1] - 1 (int32 [R + 1]), the last of them at
    position seq_lens[r] - 1 (int32 [R]). block_table int32 [R, max_pages] is read only below seq_lens. Rows of a
    request with seq_len 0 come out as 0. Capture constants: max_query_len and num_splits, which size the launch, and
    max_seq_len, a bound on seq_lens by which tiles are chosen.
    """
    out: torch.Tensor = _paged_attention_op(
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        query_start_loc,
        max_query_len,
        max_seq_len,
        num_splits,
        scale,
        sliding_window or 0,
        soft_cap or 0.0,
        sinks,
    )
    return out


def _paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    num_splits: int,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    out = query.new_zeros(*query.shape[:2], value_cache.shape[3])
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    for request, length in enumerate(lens):
        first, last = starts[request], starts[request + 1]
        if length and last > first:
            out[first:last] = _attend_one(
                query[first:last].float(),
                _tokens(key_cache, block_table[request], length),
                _tokens(value_cache, block_table[request], length),
                scale,
                sliding_window,
                soft_cap,
                sinks,
            ).to(query.dtype)
    return out


def _tokens(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` cached tokens of a request, fp32 [K, length, D]."""
    count = -(-length // cache.shape[1])
    return cache[pages[:count].long()].flatten(0, 1)[:length].transpose(0, 1).float()


def _attend_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """query fp32 [q, H, D], key [K, length, D], value [K, length, E]; fp32 [q, H, E]."""
    count, heads, dim = query.shape
    kv_heads, length, _ = key.shape
    grouped = query.view(count, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    scores = torch.matmul(grouped, key[:, None].transpose(2, 3)) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    position = torch.arange(length - count, length)[:, None]
    token = torch.arange(length)[None]
    hidden = token > position
    if sliding_window:
        hidden |= token <= position - sliding_window
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        sink = sinks.view(kv_heads, heads // kv_heads, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.matmul(weights, value[:, None]).permute(2, 0, 1, 3).reshape(count, heads, -1)


def _shape(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, *rest: object) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], value_cache.shape[3])


def _launch(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    num_splits: int,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    tokens, heads, dim = query.shape
    _, page_size, kv_heads, value_dim = value_cache.shape
    group = heads // kv_heads
    query = query if query.stride(2) == 1 else query.contiguous()
    interpreted = query.device.type == "cpu"
    # The interpreter truncates fp32 to bf16 where the hardware rounds: let torch do that conversion.
    out_dtype = torch.float32 if interpreted else query.dtype
    out = torch.empty(tokens, heads, value_dim, dtype=out_dtype, device=query.device)
    split = num_splits > 1
    partial = torch.empty(num_splits, tokens, heads, value_dim, device=query.device) if split else out
    lse = torch.empty(num_splits, tokens, heads, device=query.device) if split else out
    block_m = max(16, min(64, triton.next_power_of_2(max_query_len * group)))
    tiles = triton.cdiv(max_query_len * group, block_m)
    grid = (seq_lens.shape[0] * tiles, kv_heads, num_splits)
    tile = tile_of(
        row_bytes=(triton.next_power_of_2(dim) + triton.next_power_of_2(value_dim)) * query.element_size(),
        tokens=triton.cdiv(min(max_seq_len, sliding_window or max_seq_len), num_splits),
        alone=math.prod(grid) <= num_sms(query.device),
        block_m=block_m,
    )
    attention_kernel[grid](
        query,
        key_cache,
        value_cache,
        partial,
        lse,
        sinks,
        block_table,
        seq_lens,
        query_start_loc,
        scale,
        soft_cap,
        tiles,
        tokens,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
        HEADS=heads,
        GROUP=group,
        PAGE_SIZE=page_size,
        DIM=dim,
        VALUE_DIM=value_dim,
        BLOCK_D=triton.next_power_of_2(dim),
        BLOCK_E=triton.next_power_of_2(value_dim),
        BLOCK_M=block_m,
        SPLITS=num_splits,
        WINDOW=sliding_window,
        SOFT_CAP=soft_cap > 0,
        SINKS=sinks is not None and not split,
        FP32_DOT=interpreted,
        BLOCK_N=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent_launch(query.device),
    )
    if split:
        merge_kernel[(tokens, heads)](
            partial,
            lse,
            sinks,
            out,
            tokens,
            HEADS=heads,
            VALUE_DIM=value_dim,
            BLOCK_E=triton.next_power_of_2(value_dim),
            SPLITS=num_splits,
            BLOCK_S=triton.next_power_of_2(num_splits),
            SINKS=sinks is not None,
            num_warps=2,
            **dependent_launch(query.device),
        )
    return out.to(query.dtype)


class Tile(NamedTuple):
    """KV tokens that a program takes at once, and how it runs."""

    block_n: int
    num_warps: int
    num_stages: int


def tile_of(*, row_bytes: int, tokens: int, alone: bool, block_m: int) -> Tile:
    """The fastest on an H200, of those tried. row_bytes: of a token's key and value; tokens: of a split, at most;
    alone: whether no two programs share a multiprocessor.

    A program alone is bound by the latency of its loads, which more warps have in flight at once. So is one of a block
    or two, where a pipeline only adds to it. Others are bound by bandwidth: a stage less lets more of them run.
    """
    block_n = 64 if row_bytes <= 512 else 32 if row_bytes <= 1024 else 16
    if tokens <= block_n // 2 and block_n > 16:
        block_n //= 2
    stages = 1 if alone or tokens <= 2 * block_n else 2
    return Tile(block_n, 8 if alone and block_m == 16 else 4, stages)


_paged_attention_op = define_op_by_schema(
    "attn_backends::paged_attention",
    "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, Tensor query_start_loc, "
    "int max_query_len, int max_seq_len, int num_splits, float scale, int sliding_window, float soft_cap, "
    "Tensor? sinks) -> Tensor",
    cpu=_paged_attention,
    cuda=_launch,
    fake=_shape,
)
