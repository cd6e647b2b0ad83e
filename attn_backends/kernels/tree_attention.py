"""Attention of trees to their own tokens, merged with another kernel's attention to their cached prefix.

Shape legend: T query tokens, R requests, Hq query heads, Hkv KV heads, G = Hq / Hkv query heads per KV head, D head
dim, Dv value dim, M rows per tile (query token x head of the group), N query tokens of a request.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from attn_backends.kernels.e4m3 import to_widen, widened
from attn_backends.kernels.online_softmax import apply_softcap, sink_exponent
from attn_backends.kernels.paged_attention import length_within, seen_in_tree
from attn_backends.kernels.softmax import softmax_with_sinks
from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, stored_as, tl, triton

_TILE_ELEMENTS = 1 << 13
"""Maximum output elements per tile, which are held in registers."""


class TreeAttentionArguments(NamedTuple):
    """Merge attention over each request's own query tokens into the attention over its prefix, in place; one kernel.

    query            [T, Hq, D], with any strides but a contiguous last dim, of out's dtype or rounded to the caches'
    key_cache        [pages, page_size, Hkv, D], strided in all but the last dim, of out's dtype or narrower
    value_cache      [pages, page_size, Hkv, Dv] likewise
    block_table      int32 [R, max_pages], read only below seq_lens
    seq_lens         int32 [R], prefix plus query tokens, whose keys and values are cached after it; 0 gives rows of 0,
                     and so does a length below the number of query tokens or beyond the block table
    query_start_loc  int32 [R + 1]; request r's queries are rows query_start_loc[r] .. query_start_loc[r + 1] - 1
    sinks            fp32 [Hq], not yet applied to the prefix; -inf has no effect, +inf gives 0
    tree_masks       int64 [T], see AttentionBatch
    out              [T, Hq, Dv], contiguous: in, over the prefix; out, over all; not read if a prefix is empty
    lse              fp32 [T, Hq], strided: the logarithm of the sum over the prefix of exp(score); likewise
    lse_base_2       whether that logarithm has base 2, as in FlashInfer, or is natural, as in FlashAttention
    max_query_len    at most MAX_TREE_TOKENS; a capture constant, which sizes the launch
    scale            factor on q.k
    soft_cap         None is no cap
    key_scale        fp32 [1] or [Hkv], what stored keys are multiplied by; None is 1
    value_scale      likewise; one is None exactly if the other is
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
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None

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
        """fp32 [q, Hq, Dv]: the prefix counts as one token, whose score is its lse and whose value is its output."""
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
        """Return keys and values at position [N], fp32 [N, Hkv, D] and [N, Hkv, Dv]."""
        size = self.key_cache.shape[1]
        page, offset = self.block_table[request, position // size].long(), position % size
        own = self.key_cache[page, offset].float(), self.value_cache[page, offset].float()
        if self.key_scale is None or self.value_scale is None:
            return own
        return own[0] * self.key_scale[:, None], own[1] * self.value_scale[:, None]

    def launch(self) -> None:
        query, sinks = self.query, self.sinks
        _, heads, dim = query.shape
        _, page_size, kv_heads, value_dim = self.value_cache.shape
        max_rows = self.max_query_len * (heads // kv_heads)
        block_d, block_dv = (max(16, next_power_of_2(size)) for size in (dim, value_dim))
        block_m = max(16, min(64, next_power_of_2(max_rows), _TILE_ELEMENTS // block_dv))
        tiles = cdiv(max_rows, block_m)
        out = stored_as(self.out)
        _tree_attention_kernel[(len(self.seq_lens) * tiles, kv_heads)](
            q_ptr=to_widen(self.query),
            k_cache_ptr=to_widen(self.key_cache),
            v_cache_ptr=to_widen(self.value_cache),
            block_table_ptr=self.block_table,
            seq_lens_ptr=self.seq_lens,
            query_start_loc_ptr=self.query_start_loc,
            sinks_ptr=self.sinks,
            tree_masks_ptr=self.tree_masks,
            k_scale_ptr=self.key_scale,
            v_scale_ptr=self.value_scale,
            o_ptr=out,
            lse_ptr=self.lse,
            sm_scale=self.scale,
            softcap=self.soft_cap or 0.0,
            num_m_blocks=tiles,
            max_len=self._longest,
            stride_q_token=query.stride(0),
            stride_q_head=query.stride(1),
            stride_k_page=self.key_cache.stride(0),
            stride_k_token=self.key_cache.stride(1),
            stride_k_head=self.key_cache.stride(2),
            stride_v_page=self.value_cache.stride(0),
            stride_v_token=self.value_cache.stride(1),
            stride_v_head=self.value_cache.stride(2),
            stride_block_table=self.block_table.stride(0),
            stride_lse_token=self.lse.stride(0),
            stride_lse_head=self.lse.stride(1),
            HEADS=heads,
            GROUP=heads // kv_heads,
            PAGE_SIZE=page_size,
            HEAD_DIM=dim,
            VALUE_DIM=value_dim,
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
            BLOCK_M=block_m,
            BLOCK_N=max(16, next_power_of_2(self.max_query_len)),
            HAS_SOFTCAP=bool(self.soft_cap),
            HAS_SINKS=sinks is not None,
            HAS_SCALES=self.key_scale is not None,
            HEAD_SCALES=self.key_scale is not None and len(self.key_scale) > 1,
            LSE_BASE_2=self.lse_base_2,
            num_warps=8 if max(block_d, block_dv) >= 128 else 4,
            num_stages=1,
            **dependent_launch(query.device),
        )
        if out is not self.out:
            self.out.copy_(out)


@triton.jit
def _tree_attention_kernel(
    q_ptr,  # [T, Hq, D]
    k_cache_ptr,  # [pages, page_size, Hkv, D]
    v_cache_ptr,  # [pages, page_size, Hkv, Dv]
    block_table_ptr,  # int32 [R, max_pages]
    seq_lens_ptr,  # int32 [R]
    query_start_loc_ptr,  # int32 [R + 1]
    sinks_ptr,  # fp32 [Hq], or None
    tree_masks_ptr,  # int64 [T]: which query tokens each one sees
    k_scale_ptr,  # fp32 [1] or [Hkv]; not read unless HAS_SCALES
    v_scale_ptr,  # likewise
    o_ptr,  # in and out: [T, Hq, Dv]
    lse_ptr,  # fp32 [T, Hq], of the prefix
    sm_scale,  # factor on q.k
    softcap,  # not read unless HAS_SOFTCAP
    num_m_blocks,  # per request
    max_len,  # a length above it counts as 0
    stride_q_token,
    stride_q_head,
    stride_k_page,
    stride_k_token,
    stride_k_head,
    stride_v_page,
    stride_v_token,
    stride_v_head,
    stride_block_table,
    stride_lse_token,
    stride_lse_head,
    HEADS: tl.constexpr,  # Hq
    GROUP: tl.constexpr,  # G
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # D
    VALUE_DIM: tl.constexpr,  # Dv
    BLOCK_D: tl.constexpr,  # D, rounded up to a power of two
    BLOCK_DV: tl.constexpr,  # Dv, likewise
    BLOCK_M: tl.constexpr,  # M
    BLOCK_N: tl.constexpr,  # N, likewise
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HEAD_SCALES: tl.constexpr,  # one for each KV head
    LSE_BASE_2: tl.constexpr,  # whether lse has base 2 or is natural
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """o = (e^lse o + sum of e^qk v) / (e^lse + sum of e^qk + e^sink), over the tokens in a query token's mask.

    One program per M query rows of a KV head; grid [R * num_m_blocks, Hkv]. A request's N query tokens are one block.
    Scores are exponents of 2.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    M_INIT: tl.constexpr = -3.0e38  # finite, in a row that sees no token
    await_previous(PDL)
    # 1. The request, block of rows and KV head of this program
    request = tl.program_id(0) // num_m_blocks
    m_block = tl.program_id(0) % num_m_blocks
    kv_head = tl.program_id(1)
    q_start = tl.load(query_start_loc_ptr + request)
    q_len = tl.load(query_start_loc_ptr + request + 1) - q_start
    seq_len = length_within(tl.load(seq_lens_ptr + request), max_len)
    if m_block * BLOCK_M >= q_len * GROUP:
        return

    # 2. The query token and head of each row
    offs_m = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < q_len * GROUP
    q_token = (q_start + offs_m // GROUP).to(tl.int64)
    head = kv_head * GROUP + offs_m % GROUP
    seq_len = tl.where(seq_len < q_len, 0, seq_len)
    context_len = seq_len - q_len
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    o_ptrs = o_ptr + (q_token * HEADS + head)[:, None] * VALUE_DIM + offs_dv[None, :]
    mask_o = mask_m[:, None] & (offs_dv[None, :] < VALUE_DIM)

    # 3. Load q, and k [D, N] and v [N, Dv] of the request's query tokens. A padding row has no keys and no prefix: its
    # sum is empty and its output is 0.
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = (offs_n < q_len) & (seq_len > 0)
    kv_pos = context_len + offs_n
    table_ptr = block_table_ptr + request.to(tl.int64) * stride_block_table
    page = tl.load(table_ptr + kv_pos // PAGE_SIZE, mask=mask_n, other=0).to(tl.int64)
    page_offset = (kv_pos % PAGE_SIZE).to(tl.int64)
    DTYPE: tl.constexpr = o_ptr.dtype.element_ty
    k = tl.load(
        k_cache_ptr
        + kv_head.to(tl.int64) * stride_k_head
        + (page * stride_k_page + page_offset * stride_k_token)[None, :]
        + offs_d[:, None],
        mask=mask_n[None, :] & (offs_d[:, None] < HEAD_DIM),
        other=0.0,
    )
    v = tl.load(
        v_cache_ptr
        + kv_head.to(tl.int64) * stride_v_head
        + (page * stride_v_page + page_offset * stride_v_token)[:, None]
        + offs_dv[None, :],
        mask=mask_n[:, None] & (offs_dv[None, :] < VALUE_DIM),
        other=0.0,
    )
    q = tl.load(
        q_ptr + q_token[:, None] * stride_q_token + head.to(tl.int64)[:, None] * stride_q_head + offs_d[None, :],
        mask=mask_m[:, None] & (offs_d[None, :] < HEAD_DIM),
        other=0.0,
    )
    q, k, v = widened(q, DTYPE), widened(k, DTYPE), widened(v, DTYPE)

    # 4. qk [M, N], capped and masked, and its softmax
    if HAS_SCALES:
        sm_scale *= tl.load(k_scale_ptr + kv_head * HEAD_SCALES)
    qk = tl.dot(q, k, input_precision="ieee") * sm_scale
    if HAS_SOFTCAP:
        qk = apply_softcap(qk, softcap)
    ancestors = tl.load(tree_masks_ptr + q_token, mask=mask_m, other=0)
    qk_mask = seen_in_tree(ancestors[:, None], offs_n[None, :]) & mask_n[None, :]
    qk = tl.where(qk_mask, qk * LOG2_E, float("-inf"))
    m_i = tl.maximum(tl.max(qk, 1), M_INIT)
    p = tl.exp2(qk - m_i[:, None])
    l_i = tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, input_precision="ieee")
    if HAS_SCALES:
        acc *= tl.load(v_scale_ptr + kv_head * HEAD_SCALES)

    # 5. The prefix counts as one token of score lse. Its length decides whether it is empty: libraries differ in the
    # lse of an empty one, and FlashAttention-3 also returns -inf for one whose sum is NaN.
    has_prefix = mask_m & (context_len > 0)
    o_prefix = tl.load(o_ptrs, mask=mask_o & (context_len > 0), other=0.0).to(tl.float32)
    lse_ptrs = lse_ptr + q_token * stride_lse_token + head * stride_lse_head
    lse_prefix = tl.load(lse_ptrs, mask=has_prefix, other=float("-inf"))
    if not LSE_BASE_2:
        lse_prefix = lse_prefix * LOG2_E
    # 6. The shares of the query tokens, the prefix and the sink
    m_all = tl.maximum(m_i, lse_prefix)
    if HAS_SINKS:
        sink = sink_exponent(tl.load(sinks_ptr + head, mask=mask_m, other=0.0))
        m_all = tl.maximum(m_all, sink)
    alpha = tl.exp2(m_i - m_all)
    alpha_prefix = tl.exp2(lse_prefix - m_all)
    l_i = l_i * alpha + alpha_prefix
    if HAS_SINKS:
        l_i += tl.exp2(sink - m_all)
    acc = acc * alpha[:, None] + o_prefix * alpha_prefix[:, None]
    # 7. Divide and store. The test is for equality, so that a NaN is not taken for an empty row.
    acc = acc / tl.where(l_i == 0, 1.0, l_i)[:, None]
    tl.store(o_ptrs, acc.to(o_ptr.dtype.element_ty), mask=mask_o)


tree_attention = define_op("attn_backends::tree_attention", TreeAttentionArguments, mutates=("out",))
