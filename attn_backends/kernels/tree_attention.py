"""Attention of trees to their own tokens, merged with that of another kernel to what was cached before them.

Shape legend: T query tokens, R requests, H query heads, K KV heads, G = H / K query heads a KV head, D head dim,
E value dim, M rows of a tile (query token x head of the group), N query tokens of a request.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from attn_backends.kernels.paged_attention import finite_above, length_within, seen_in_tree
from attn_backends.kernels.softmax import softmax_with_sinks
from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton

_TILE_ELEMENTS = 1 << 13
"""Of the outputs of a tile, which lie in registers."""


class TreeAttentionArguments(NamedTuple):
    """Add to the attention over each request's prefix that over its own query tokens, in place; one kernel.

    query            [T, H, D], with any strides but a contiguous last dim, of out's dtype or rounded to the caches'
    key_cache        [pages, page_size, K, D], strided in all but the last dim, of out's dtype or narrower
    value_cache      [pages, page_size, K, E] likewise
    block_table      int32 [R, max_pages], read only below seq_lens
    seq_lens         int32 [R], those of the prefix and of the query tokens, whose keys and values are cached after it;
                     0 gives rows of 0, and so does one of fewer than the query tokens or beyond the block table
    query_start_loc  int32 [R + 1]; request r's queries are rows query_start_loc[r] .. query_start_loc[r + 1] - 1
    sinks            fp32 [H], which the prefix was attended to without; -inf is none, +inf gives 0
    tree_masks       int64 [T], as AttentionBatch has them
    out              [T, H, E], contiguous: of the prefix, then of all; not read where a prefix is empty
    lse              fp32 [T, H], strided: the logarithm of the sum over the prefix of exp(score); likewise
    lse_base_2       whether that logarithm is of base 2, as FlashInfer has it, or natural, as FlashAttention has it
    max_query_len    at most MAX_TREE_TOKENS; a capture constant, which sizes the launch
    scale            of q.k
    soft_cap         None is no cap
    """

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    sinks: torch.Tensor | None
    tree_masks: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    lse_base_2: bool
    max_query_len: int
    scale: float
    soft_cap: float | None

    @property
    def _longest(self) -> int:
        return self.block_table.shape[1] * self.key_cache.shape[1]

    def reference(self) -> None:
        starts, lens = self.query_start_loc.tolist(), self.seq_lens.tolist()
        for request, length in enumerate(lens):
            rows = slice(starts[request], starts[request + 1])
            if rows.stop > rows.start:
                inside = rows.stop - rows.start <= length <= self._longest
                self.out[rows] = self._merged(request, rows, length).to(self.out.dtype) if inside else 0.0

    def _merged(self, request: int, rows: slice, length: int) -> torch.Tensor:
        """fp32 [q, H, E]: the prefix counts as one token, whose score is its lse and whose value is its output."""
        count = rows.stop - rows.start
        token = torch.arange(count)
        kv_heads = self.key_cache.shape[2]
        key, value = self._own_tokens(request, length - count + token)
        query, prefix = (tensor[rows].float().unflatten(1, (kv_heads, -1)) for tensor in (self.query, self.out))
        scores = torch.einsum("qkgd,nkd->qkgn", query, key) * self.scale
        if self.soft_cap:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        hidden = self.tree_masks[rows, None] >> token & 1 == 0
        scores = scores.masked_fill(hidden[:, None, None], -math.inf)
        lse = (self.lse[rows] * (math.log(2) if self.lse_base_2 else 1.0)).unflatten(1, (kv_heads, -1))
        if length == count:
            lse, prefix = torch.full_like(lse, -math.inf), torch.zeros_like(prefix)
        sinks = None if self.sinks is None else self.sinks.view(kv_heads, -1, 1)
        weights = softmax_with_sinks(torch.cat([lse[..., None], scores], -1), sinks)
        merged: torch.Tensor = prefix * weights[..., :1] + torch.einsum("qkgn,nkd->qkgd", weights[..., 1:], value)
        return merged.flatten(1, 2)

    def _own_tokens(self, request: int, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at position [N], fp32 [N, K, D] and [N, K, E]."""
        size = self.key_cache.shape[1]
        page, offset = self.block_table[request, position // size].long(), position % size
        return self.key_cache[page, offset].float(), self.value_cache[page, offset].float()

    def launch(self) -> None:
        query, sinks = self.query, self.sinks
        _, heads, dim = query.shape
        _, page_size, kv_heads, value_dim = self.value_cache.shape
        max_rows = self.max_query_len * (heads // kv_heads)
        block_d, block_e = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
        block_m = max(16, min(64, triton.next_power_of_2(max_rows), _TILE_ELEMENTS // block_e))
        tiles = triton.cdiv(max_rows, block_m)
        # The interpreter truncates fp32 to bf16 where the hardware rounds: let torch do that conversion.
        out = self.out.float() if query.device.type == "cpu" else self.out
        _tree_attention_kernel[(len(self.seq_lens) * tiles, kv_heads)](
            *self[:8],
            out,
            self.lse,
            self.scale,
            self.soft_cap or 0.0,
            tiles,
            self._longest,
            *query.stride()[:2],
            *self.key_cache.stride()[:3],
            *self.value_cache.stride()[:3],
            self.block_table.stride(0),
            *self.lse.stride(),
            HEADS=heads,
            GROUP=heads // kv_heads,
            PAGE_SIZE=page_size,
            DIM=dim,
            VALUE_DIM=value_dim,
            BLOCK_D=block_d,
            BLOCK_E=block_e,
            BLOCK_M=block_m,
            BLOCK_N=max(16, triton.next_power_of_2(self.max_query_len)),
            SOFT_CAP=bool(self.soft_cap),
            SINKS=sinks is not None,
            LSE_BASE_2=self.lse_base_2,
            num_warps=8 if max(block_d, block_e) >= 128 else 4,
            num_stages=1,
            **dependent_launch(query.device),
        )
        if out is not self.out:
            self.out.copy_(out)


@triton.jit
def _tree_attention_kernel(
    query,  # [T, H, D]
    key_cache,  # [pages, page_size, K, D]
    value_cache,  # [pages, page_size, K, E]
    block_table,  # int32 [R, max_pages]
    seq_lens,  # int32 [R]
    query_start_loc,  # int32 [R + 1]
    sinks,  # fp32 [H], or None
    tree_masks,  # int64 [T]: which query tokens each one sees
    out,  # in and out: [T, H, E]
    lse,  # fp32 [T, H], of the prefix
    scale,  # of q.k
    soft_cap,  # not read unless SOFT_CAP
    tiles,  # of a request
    longest,  # a length above it counts as 0
    q_token_stride,
    q_head_stride,
    k_page_stride,
    k_token_stride,
    k_head_stride,
    v_page_stride,
    v_token_stride,
    v_head_stride,
    table_stride,
    lse_token_stride,
    lse_head_stride,
    HEADS: tl.constexpr,  # H
    GROUP: tl.constexpr,  # G
    PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr,  # D
    VALUE_DIM: tl.constexpr,  # E
    BLOCK_D: tl.constexpr,  # D, rounded up to a power of two
    BLOCK_E: tl.constexpr,  # E, likewise
    BLOCK_M: tl.constexpr,  # M
    BLOCK_N: tl.constexpr,  # N, likewise
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    LSE_BASE_2: tl.constexpr,  # whether lse is a logarithm of base 2 or natural
    PDL: tl.constexpr,
):
    """One program merges M query rows of one KV head: their prefix, from out and lse, and their request's query tokens.

    Its grid is [R * tiles, K]. All N query tokens are one block. Scores are exponents of 2.
    """
    await_previous(PDL)
    # The request, tile and KV head of this program
    request = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    kv_head = tl.program_id(1)
    first = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - first
    seq_len = length_within(tl.load(seq_lens + request), longest)
    if tile * BLOCK_M >= query_len * GROUP:
        return

    # The query token and head of each row
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_row = row < query_len * GROUP
    token = (first + row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    seq_len = tl.where(seq_len < query_len, 0, seq_len)
    cached = seq_len - query_len
    dim = tl.arange(0, BLOCK_D)
    edim = tl.arange(0, BLOCK_E)
    to = out + (token * HEADS + head)[:, None] * VALUE_DIM + edim[None, :]
    in_out = in_row[:, None] & (edim[None, :] < VALUE_DIM)

    # Keys and values of the request's query tokens. A padding row has no keys and no prefix: its sum is empty and its
    # output is 0.
    own = tl.arange(0, BLOCK_N)
    owned = (own < query_len) & (seq_len > 0)
    position = cached + own
    table = block_table + request.to(tl.int64) * table_stride
    page = tl.load(table + position // PAGE_SIZE, mask=owned, other=0).to(tl.int64)
    offset = (position % PAGE_SIZE).to(tl.int64)
    k = tl.load(
        key_cache
        + kv_head.to(tl.int64) * k_head_stride
        + (page * k_page_stride + offset * k_token_stride)[None, :]
        + dim[:, None],
        mask=owned[None, :] & (dim[:, None] < DIM),
        other=0.0,
    ).to(out.dtype.element_ty)
    v = tl.load(
        value_cache
        + kv_head.to(tl.int64) * v_head_stride
        + (page * v_page_stride + offset * v_token_stride)[:, None]
        + edim[None, :],
        mask=owned[:, None] & (edim[None, :] < VALUE_DIM),
        other=0.0,
    ).to(out.dtype.element_ty)
    q = tl.load(
        query + token[:, None] * q_token_stride + head.to(tl.int64)[:, None] * q_head_stride + dim[None, :],
        mask=in_row[:, None] & (dim[None, :] < DIM),
        other=0.0,
    ).to(out.dtype.element_ty)

    # Their scores, soft_cap * tanh(score / soft_cap) where there is a cap, and their softmax
    scores = tl.dot(q, k, input_precision="ieee") * scale
    if SOFT_CAP:
        ratio = tl.exp2(-2.8853900817779268 * tl.abs(scores / soft_cap))  # 2 * log2(e)
        scores = soft_cap * tl.where(scores >= 0, 1.0, -1.0) * (1.0 - ratio) / (1.0 + ratio)
    ancestors = tl.load(tree_masks + token, mask=in_row, other=0)
    seen = seen_in_tree(ancestors[:, None], own[None, :]) & owned[None, :]
    scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))  # log2(e)
    peak = tl.maximum(tl.max(scores, 1), -3.0e38)  # finite in a row that sees no token
    weights = tl.exp2(scores - peak[:, None])
    total = tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, input_precision="ieee")

    # The prefix counts as one token of score lse. Whether it is empty is told by its length: libraries differ in the
    # lse of an empty one, and FlashAttention-3 has -inf for one whose sum is NaN, too.
    merges = in_row & (cached > 0)
    prefix = tl.load(to, mask=in_out & (cached > 0), other=0.0).to(tl.float32)
    of_prefix = tl.load(lse + token * lse_token_stride + head * lse_head_stride, mask=merges, other=float("-inf"))
    if not LSE_BASE_2:
        of_prefix = of_prefix * 1.4426950408889634  # log2(e)
    # The shares of the query tokens, the prefix and the sink
    joint = tl.maximum(peak, of_prefix)
    if SINKS:
        sink = finite_above(tl.load(sinks + head, mask=in_row, other=0.0))
        joint = tl.maximum(joint, sink)
    share = tl.exp2(peak - joint)
    prefix_share = tl.exp2(of_prefix - joint)
    total = total * share + prefix_share
    if SINKS:
        total += tl.exp2(sink - joint)
    acc = acc * share[:, None] + prefix * prefix_share[:, None]
    # Divide and store. By equality, so that a NaN is not taken for an empty row.
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=in_out)


tree_attention = define_op("attn_backends::tree_attention", TreeAttentionArguments, mutates=("out",))
