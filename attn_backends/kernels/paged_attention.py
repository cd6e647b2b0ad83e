"""Attention over a paged cache: one kernel for decode and extend, split over KV tokens, and the merge.

Shape legend: T query tokens, R requests, H query heads, K KV heads, G = H / K query heads a KV head, D head dim,
E value dim, S splits, M rows of a tile (query token x head of the group), N KV tokens of a block.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from attn_backends.kernels.paged_attention_kernels import attention_kernel, merge_kernel
from attn_backends.kernels.softmax import softmax_with_sinks
from builders.kernels.op import define_op
from builders.kernels.triton_runtime import dependent_launch, triton
from builders.paged import SPLIT_TOKENS, num_sms
from builders.spec import MAX_TREE_TOKENS


class PagedAttentionArguments(NamedTuple):
    """Attention of query [T, H, D] over paged caches; returns [T, H, E] in query's dtype.

    query            [T, H, D]
    key_cache        [pages, page_size, K, D] of query's dtype, strided in all but the last dim
    value_cache      [pages, page_size, K, E] likewise
    block_table      int32 [R, max_pages], read only below seq_lens
    seq_lens         int32 [R]; the last query of request r is at position seq_lens[r] - 1; 0 gives rows of 0, and so
                     does one that is negative, or beyond max_seq_len or the block table
    query_start_loc  int32 [R + 1]; request r's queries are rows query_start_loc[r] .. query_start_loc[r + 1] - 1
    sinks            fp32 [H]; -inf is none, +inf gives 0
    tree_masks       int64 [T], or None: queries are trees, as AttentionBatch has them
    max_query_len    a capture constant, which sizes the launch
    max_seq_len      a capture constant: the bound on seq_lens by which tiles are chosen
    num_splits       a capture constant, which sizes the launch
    scale            of q.k
    sliding_window   tokens a query sees, itself included; None is all
    soft_cap         None is no cap
    causal           False: a query sees its request's queries behind it too, where they form no tree
    batch_invariant  cut by the op's sizes and a token's position alone: a row's bits are those it has in any batch;
                     splits are of SPLIT_TOKENS tokens, and the last takes what is left
    """

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    sinks: torch.Tensor | None
    tree_masks: torch.Tensor | None
    max_query_len: int
    max_seq_len: int
    num_splits: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    causal: bool
    batch_invariant: bool

    @property
    def longest(self) -> int:
        """The length that a row of the block table has entries for, max_seq_len at most."""
        return min(self.max_seq_len, self.block_table.shape[1] * self.key_cache.shape[1])

    def reference(self) -> torch.Tensor:
        out = self.fake().zero_()
        starts, lens = self.query_start_loc.tolist(), self.seq_lens.tolist()
        for request, length in enumerate(lens):
            length = length if 0 <= length <= self.longest else 0
            first, last = starts[request], starts[request + 1]
            # Sums of torch depend on the shape: where they must not, each token is attended alone.
            step = 1 if self.batch_invariant else max(1, last - first)
            for start in range(first, last if length else first, step):
                whole = self.tree_masks is not None or not self.causal
                end = length if whole else length - (last - start - step)
                pages, rows = self.block_table[request], slice(start, start + step)
                key, value = _tokens(self.key_cache, pages, end), _tokens(self.value_cache, pages, end)
                hidden = self._hidden(rows, length - (last - first), start - first, end)
                out[rows] = self._attend_one(self.query[rows].float(), key, value, hidden).to(out.dtype)
        return out

    def _hidden(self, rows: slice, cached: int, before: int, length: int) -> torch.Tensor:
        """Bool [q, length]: what the queries `rows` of a request do not see of it, after `cached` tokens and `before`
        other queries."""
        token = torch.arange(length)[None]
        if self.tree_masks is None:
            position = cached + before + torch.arange(rows.stop - rows.start)[:, None]
            hidden = token > position if self.causal else token < 0
        else:
            masks = self.tree_masks[rows, None]
            bits = masks >> torch.arange(MAX_TREE_TOKENS) & 1
            position = cached + bits.sum(1, keepdim=True) - 1
            hidden = (token >= cached) & (masks >> (token - cached).clamp(0, MAX_TREE_TOKENS - 1) & 1 == 0)
        if self.sliding_window:
            hidden = hidden | (token <= position - self.sliding_window)
        return hidden

    def _attend_one(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """query fp32 [q, H, D], key [K, length, D], value [K, length, E], hidden bool [q, length]; fp32 [q, H, E]."""
        count, heads, dim = query.shape
        kv_heads = len(key)
        grouped = query.view(count, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
        scores = torch.matmul(grouped, key[:, None].transpose(2, 3)) * self.scale
        if self.soft_cap:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        scores = scores.masked_fill(hidden, -math.inf)
        sinks = None if self.sinks is None else self.sinks.view(kv_heads, heads // kv_heads, 1, 1)
        weights = softmax_with_sinks(scores, sinks)
        return torch.matmul(weights, value[:, None]).permute(2, 0, 1, 3).reshape(count, heads, -1)

    def fake(self) -> torch.Tensor:
        return self.query.new_empty(*self.query.shape[:2], self.value_cache.shape[3])

    def launch(self) -> torch.Tensor:
        query, splits, sinks = self.query, self.num_splits, self.sinks
        query = query if query.stride(2) == 1 else query.contiguous()
        tokens, heads, dim = query.shape
        _, page_size, kv_heads, value_dim = self.value_cache.shape
        group, split = heads // kv_heads, splits > 1
        interpreted = query.device.type == "cpu"
        # The interpreter truncates fp32 to bf16 where the hardware rounds: let torch do that conversion.
        out_dtype = torch.float32 if interpreted else query.dtype
        out = torch.empty(tokens, heads, value_dim, dtype=out_dtype, device=query.device)
        partial = torch.empty(splits, tokens, heads, value_dim, device=query.device) if split else out
        lse = torch.empty(splits, tokens, heads, device=query.device) if split else out
        block_d, block_e = triton.next_power_of_2(dim), triton.next_power_of_2(value_dim)
        fixed, max_rows = self.batch_invariant, self.max_query_len * group
        block_m = max(16, min(64, triton.next_power_of_2(group if fixed else max_rows)))
        tiles = triton.cdiv(max_rows, block_m)
        grid = (self.seq_lens.shape[0] * tiles, kv_heads, splits)
        visible = triton.cdiv(min(self.max_seq_len, self.sliding_window or self.max_seq_len), splits)
        tile = tile_config(
            row_bytes=(block_d + block_e) * query.element_size(),
            tokens=SPLIT_TOKENS if fixed else visible,
            alone=not fixed and math.prod(grid) <= num_sms(query.device),
            block_m=block_m,
        )
        attention_kernel[grid](
            query, *self[1:8], partial, lse, self.scale, self.soft_cap or 0.0, tiles, tokens, self.longest,
            *query.stride()[:2], *self.key_cache.stride()[:3], *self.value_cache.stride()[:3],
            self.block_table.stride(0),
            HEADS=heads, GROUP=group, PAGE_SIZE=page_size, DIM=dim, VALUE_DIM=value_dim, BLOCK_D=block_d,
            BLOCK_E=block_e, BLOCK_M=block_m, SPLITS=splits,
            SPLIT_BLOCKS=SPLIT_TOKENS // tile["BLOCK_N"] if fixed else 0, WINDOW=self.sliding_window or 0,
            CAUSAL=self.causal, TREE=self.tree_masks is not None, SOFT_CAP=bool(self.soft_cap),
            SINKS=sinks is not None and not split,
            WIDE_PAGES=page_size * max(self.key_cache.stride(1), self.value_cache.stride(1)) >= 1 << 31,
            FP32_DOT=interpreted, **tile, **dependent_launch(query.device),
        )  # fmt: skip
        if split:
            merge_kernel[(tokens, heads)](
                partial, lse, sinks, out, tokens, HEADS=heads, VALUE_DIM=value_dim, BLOCK_E=block_e, SPLITS=splits,
                BLOCK_S=triton.next_power_of_2(splits), SINKS=sinks is not None, IN_ORDER=fixed,
                num_warps=2, **dependent_launch(query.device),
            )  # fmt: skip
        return out.to(query.dtype)


def _tokens(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` cached tokens of a request, fp32 [K, length, D]."""
    count = -(-length // cache.shape[1])
    return cache[pages[:count].long()].flatten(0, 1)[:length].transpose(0, 1).float()


def tile_config(*, row_bytes: int, tokens: int, alone: bool, block_m: int) -> dict[str, int]:
    """KV tokens that a program takes at once, and how it runs: the fastest on an H200, of those tried.

    row_bytes: of a token's key and value; tokens: of a split, at most; alone: whether no two programs share an SM.

    A program alone is bound by the latency of its loads, which more warps have in flight at once. So is one of a block
    or two, where a pipeline only adds to it. Others are bound by bandwidth: a stage less lets more of them run.
    """
    block_n = 64 if row_bytes <= 512 else 32 if row_bytes <= 1024 else 16
    if tokens <= block_n // 2 and block_n > 16:
        block_n //= 2
    stages = 1 if alone or tokens <= 2 * block_n else 2
    return {"BLOCK_N": block_n, "num_warps": 8 if alone and block_m == 16 else 4, "num_stages": stages}


paged_attention = define_op("attn_backends::paged_attention", PagedAttentionArguments)
