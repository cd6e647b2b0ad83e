"""Attention over a paged cache: one kernel for decode and extend, split over KV tokens, and the merge of the splits.

FlashAttention-2's forward pass (arXiv:2307.08691, algorithm 1), with a request's KV tokens split as in Flash-Decoding.

Shape legend: T query tokens, R requests, Hq query heads, Hkv KV heads, G = Hq / Hkv query heads per KV head, D head
dim, Dv value dim, S splits, M rows per tile (query token x head of the group), N KV tokens per block.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from attn_backends.kernels.e4m3 import to_widen, widened
from attn_backends.kernels.online_softmax import apply_softcap, sink_exponent
from attn_backends.kernels.softmax import softmax_with_sinks
from builders.devices import room_of
from builders.errors import BatchError
from builders.kernels.kv_blocks import block_of
from builders.kernels.op import define_op
from builders.kernels.rows import whole_rows
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, stored_as, tl, triton
from builders.paged import SPLIT_TOKENS
from builders.spec import MAX_TREE_TOKENS

_PROMPT = 16
"""Queries of a request from which the torch implementation leaves the sum to torch's own attention."""
_MOST_ROWS, _MORE_ROWS, _LONG_PROMPT = 64, 128, 2048
"""Rows per tile; those of prompts in 16 bits that are faster so: with heads of 256 dims, and from this many queries on
with heads of 128. With 1,000 and 8,192 queries, and 8,192 after 24,576 tokens, heads of 128 reach 228, 323 and 345
teraflops a second in 128 rows, 233, 306 and 314 in 64; heads of 64 185 and 200 (H200; not timed over 8-bit caches)."""
_LEAST_DIMS = 16
"""Of a program that merges: 64 bytes of each split."""
MERGED_BY_A_WARP = 32 * 64
"""Partial outputs that a warp's threads hold, in 64 registers each."""


class PagedAttentionArguments(NamedTuple):
    """Attention of query [T, Hq, D] over paged caches; returns [T, Hq, Dv] in query's dtype.

    query            [T, Hq, D]
    key_cache        [pages, page_size, Hkv, D] of query's dtype or e4m3, strided in all but the last dim
    value_cache      [pages, page_size, Hkv, Dv] likewise
    block_table      int32 [R, max_pages], read only below seq_lens
    seq_lens         int32 [R]; the last query of request r is at position seq_lens[r] - 1; 0 gives rows of 0, and so
                     does a length that is negative, or beyond max_seq_len or the block table
    query_start_loc  int32 [R + 1]; request r's queries are rows query_start_loc[r] .. query_start_loc[r + 1] - 1. Rows
                     from query_start_loc[R] on belong to no request; their output is undefined
    sinks            fp32 [Hq]; -inf has no effect, +inf gives 0
    tree_masks       int64 [T], or None: queries are trees, see AttentionBatch
    max_query_len    a capture constant, which sizes the launch
    max_seq_len      a capture constant: the bound on seq_lens by which tiles are chosen
    num_splits       a capture constant, which sizes the launch
    scale            factor on q.k
    sliding_window   tokens a query sees, itself included; None is all
    soft_cap         None is no cap
    causal           False: a query also sees its request's later queries, unless they form a tree
    batch_invariant  tile by the op's sizes and a token's position only: a row has the same bits in any batch; splits
                     have SPLIT_TOKENS tokens, and the last takes the rest. With a window there is one split
    key_scale        fp32 [1] or [Hkv], what stored keys are multiplied by; None is 1
    value_scale      likewise; one is None exactly if the other is

    Raises BatchError for batch_invariant with a window and more than one split.
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
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None

    @property
    def longest(self) -> int:
        """The longest valid length: the capacity of a block-table row, at most max_seq_len."""
        return min(self.max_seq_len, self.block_table.shape[1] * self.key_cache.shape[1])

    def _check(self) -> None:
        # Splits begin at the window of a tile's first row, and which row that is depends on the batch.
        if self.batch_invariant and self.sliding_window and self.num_splits > 1:
            raise BatchError(
                "a batch-invariant kernel must not split a sliding window, since split starts would depend on the "
                f"batch, got num_splits={self.num_splits}, sliding_window={self.sliding_window}. Pass num_splits=1."
            )

    @property
    def _whole_blocks(self) -> bool:
        """Whether blocks of tokens that all rows of a tile see have a loop of their own: without a window or a cap, and
        not where each row needs the same operations in any batch."""
        return not (self.sliding_window or self.soft_cap or self.batch_invariant) and self.scale > 0

    @property
    def _is_prompt(self) -> bool:
        """Whether products, not loads, take most of the time."""
        chain = self.causal and self.tree_masks is None
        return chain and self.max_query_len > MAX_TREE_TOKENS and self._whole_blocks

    def reference(self) -> torch.Tensor:
        self._check()
        out = self.fake().zero_()
        starts, lens = self.query_start_loc.tolist(), self.seq_lens.tolist()
        for request, length in enumerate(lens):
            length = length if 0 <= length <= self.longest else 0
            first, last = starts[request], starts[request + 1]
            # torch's sums depend on the shape: to be batch invariant, each token is attended separately.
            step = 1 if self.batch_invariant else max(1, last - first)
            for start in range(first, last if length else first, step):
                whole = self.tree_masks is not None or not self.causal
                # With fewer tokens than queries the first queries see none; one hidden token stands in for that.
                end = length if whole else max(1, length - (last - start - step))
                pages, rows = self.block_table[request], slice(start, start + step)
                key = _tokens(self.key_cache, pages, end, self.key_scale)
                value = _tokens(self.value_cache, pages, end, self.value_scale)
                hidden = self._hidden(rows, length - (last - first), start - first, end)
                out[rows] = self._attend(self.query[rows].float(), key, value, hidden).to(out.dtype)
        return out

    def _hidden(self, rows: slice, cached: int, before: int, length: int) -> torch.Tensor:
        """Bool [q, length]: tokens hidden from a request's queries `rows`, after `cached` tokens and `before`
        queries."""
        token = torch.arange(length)[None]
        if self.tree_masks is None:
            position = cached + before + torch.arange(rows.stop - rows.start)[:, None]
            hidden = token > position if self.causal else token < 0
        else:
            masks = self.tree_masks[rows, None]
            bits = masks >> torch.arange(MAX_TREE_TOKENS) & 1
            # A token without a mask yet has the root's position.
            position = cached + (bits.sum(1, keepdim=True) - 1).clamp(min=0)
            hidden = (token >= cached) & (masks >> (token - cached).clamp(0, MAX_TREE_TOKENS - 1) & 1 == 0)
        if self.sliding_window:
            hidden = hidden | (token <= position - self.sliding_window)
        return hidden

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """query fp32 [q, Hq, D], key [Hkv, length, D], value [Hkv, length, Dv], hidden bool [q, length] or [1, length];
        returns fp32 [q, Hq, Dv]."""
        # A finite sum has finite terms.
        if not math.isfinite(key.sum() + value.sum()) and not bool(key.isfinite().all() and value.isfinite().all()):
            # A NaN would survive a weight of 0, so each query alone, over zeros for the tokens that it does not see.
            alone = zip(query.split(1), hidden.expand(len(query), -1), strict=True)
            zeroed = ((q, *(x.masked_fill(h[:, None], 0.0) for x in (key, value)), h) for q, h in alone)
            return torch.cat([self._softmax(*each) for each in zeroed])
        # A query may see nothing: the first of more queries than tokens, or one of a tree without a mask yet.
        plain = self.tree_masks is None and key.shape[1] >= len(query) >= _PROMPT
        if not plain or self.soft_cap or self.sinks is not None:
            return self._softmax(query, key, value, hidden)
        # The same, without the scores in memory: a chunk of 512 tokens after 2,048 takes a sixth of the time on a CPU.
        # If all is new, without a mask: half of the work is then left out.
        whole = self.causal and not self.sliding_window and key.shape[1] == len(query)
        out = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key[None],
            value[None],
            attn_mask=None if whole else ~hidden.expand(len(query), -1),
            is_causal=whole,
            scale=self.scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)

    def _softmax(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """As `_attend`, by the definition."""
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

    def launch(self, tile: dict[str, int] | None = None) -> torch.Tensor:
        """Launch the kernel. tile: BLOCK_M, and what `tile_config` returns, instead of the op's own choice."""
        self._check()
        query, splits, sinks = whole_rows(self.query), self.num_splits, self.sinks
        tokens, heads, dim = query.shape
        _, page_size, kv_heads, value_dim = self.value_cache.shape
        group, split = heads // kv_heads, splits > 1
        out = stored_as(self.fake())
        # A single split writes to `out` and has no lse, but the kernel still takes a pointer.
        partial = query.new_empty(splits, tokens, heads, value_dim, dtype=torch.float32) if split else out
        lse = query.new_empty(splits, tokens, heads, dtype=torch.float32) if split else out
        invariant, tile = self.batch_invariant, tile or self.own_tile()
        num_m_blocks = cdiv(self.max_query_len * group, tile["BLOCK_M"])
        grid = (self.seq_lens.shape[0] * num_m_blocks, kv_heads, splits)
        attention_kernel[grid](
            q_ptr=query,
            k_cache_ptr=to_widen(self.key_cache),
            v_cache_ptr=to_widen(self.value_cache),
            block_table_ptr=self.block_table,
            seq_lens_ptr=self.seq_lens,
            query_start_loc_ptr=self.query_start_loc,
            sinks_ptr=self.sinks,
            tree_masks_ptr=self.tree_masks,
            k_scale_ptr=self.key_scale,
            v_scale_ptr=self.value_scale,
            o_ptr=partial,
            lse_ptr=lse,
            sm_scale=self.scale,
            softcap=self.soft_cap or 0.0,
            num_m_blocks=num_m_blocks,
            num_tokens=tokens,
            max_len=self.longest,
            stride_q_token=query.stride(0),
            stride_q_head=query.stride(1),
            stride_k_page=self.key_cache.stride(0),
            stride_k_token=self.key_cache.stride(1),
            stride_k_head=self.key_cache.stride(2),
            stride_v_page=self.value_cache.stride(0),
            stride_v_token=self.value_cache.stride(1),
            stride_v_head=self.value_cache.stride(2),
            stride_block_table=self.block_table.stride(0),
            HEADS=heads,
            GROUP=group,
            PAGE_SIZE=page_size,
            HEAD_DIM=dim,
            VALUE_DIM=value_dim,
            BLOCK_D=next_power_of_2(dim),
            BLOCK_DV=next_power_of_2(value_dim),
            NUM_SPLITS=splits,
            SPLIT_BLOCKS=SPLIT_TOKENS // tile["BLOCK_N"] if invariant else 0,
            SLIDING_WINDOW=self.sliding_window or 0,
            IS_CAUSAL=self.causal,
            TREE=self.tree_masks is not None,
            WHOLE_BLOCKS=self._whole_blocks,
            HAS_SOFTCAP=bool(self.soft_cap),
            HAS_SINKS=sinks is not None and not split,  # with several splits the merge adds them
            HAS_SCALES=self.key_scale is not None,
            HEAD_SCALES=self.key_scale is not None and len(self.key_scale) > 1,
            WIDE_PAGES=page_size * max(self.key_cache.stride(1), self.value_cache.stride(1)) >= 1 << 31,
            FP32_DOT=query.device.type == "cpu",
            **tile,
            **dependent_launch(query.device),
        )
        if split:
            launch_merge(partial, lse, sinks, out, in_order=invariant, num_warps=2)
        return out.to(query.dtype)

    def own_tile(self) -> dict[str, int]:
        """Return BLOCK_M and what `tile_config` or `prompt_tile` returns for the op's sizes and device."""
        query, splits, kv_heads = self.query, self.num_splits, self.value_cache.shape[2]
        room, size, group = room_of(query.device), query.element_size(), query.shape[1] // kv_heads
        width = next_power_of_2(query.shape[2]) + next_power_of_2(self.value_cache.shape[3])
        invariant, prompt, max_rows = self.batch_invariant, self._is_prompt, self.max_query_len * group
        faster = width == 512 or (width == 256 and self.max_query_len >= _LONG_PROMPT)
        most = _MORE_ROWS if faster and prompt and size == 2 and room.wgmma else _MOST_ROWS
        # tl.dot needs at least 16 rows. A batch-invariant tile must not depend on max_query_len, which varies by batch.
        block_m = max(16, min(most, next_power_of_2(group if invariant else max_rows)))
        row_bytes = width * size
        if prompt:
            return {"BLOCK_M": block_m, **prompt_tile(row_bytes=row_bytes, block_m=block_m, wgmma=room.wgmma)}
        programs = self.seq_lens.shape[0] * cdiv(max_rows, block_m) * kv_heads * splits
        seen = min(self.max_seq_len, self.sliding_window or self.max_seq_len)
        config = tile_config(
            block_n=block_of(block_m, row_bytes, size, room).tokens, row_bytes=row_bytes,
            tokens=SPLIT_TOKENS if invariant else cdiv(seen, splits),
            alone=not invariant and programs <= room.num_sms, block_m=block_m, wgmma=room.wgmma,
        )  # fmt: skip
        return {"BLOCK_M": block_m, **config}


def launch_merge(
    partial: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    *,
    in_order: bool,
    num_warps: int,
) -> None:
    """Merge partial fp32 [S, T, Hq, Dv] by lse fp32 [S, T, Hq] into out [T, Hq, Dv]; in_order: see merge_kernel.

    partial can be unwritten for a split whose lse is -inf. A program takes as many dims as its warps hold.
    """
    splits, tokens, heads, value_dim = partial.shape
    block_s = next_power_of_2(splits)
    dims = MERGED_BY_A_WARP * num_warps // (1 if in_order else block_s)
    block_dv = min(next_power_of_2(value_dim), max(_LEAST_DIMS, dims))
    merge_kernel[(tokens, heads, cdiv(value_dim, block_dv))](
        o_partial_ptr=partial,
        lse_ptr=lse,
        sinks_ptr=sinks,
        o_ptr=out,
        num_tokens=tokens,
        HEADS=heads,
        VALUE_DIM=value_dim,
        BLOCK_DV=block_dv,
        NUM_SPLITS=splits,
        BLOCK_S=block_s,
        HAS_SINKS=sinks is not None,
        IN_ORDER=in_order,
        num_warps=num_warps,
        **dependent_launch(out.device),
    )


def _tokens(cache: torch.Tensor, pages: torch.Tensor, length: int, scale: torch.Tensor | None) -> torch.Tensor:
    """Return the first `length` cached tokens of a request, fp32 [Hkv, length, D]."""
    stored = cache[pages[: cdiv(length, cache.shape[1])].long()].flatten(0, 1)[:length].transpose(0, 1).float()
    return stored if scale is None else stored * scale[:, None, None]


def tile_config(*, block_n: int, row_bytes: int, tokens: int, alone: bool, block_m: int, wgmma: bool) -> dict[str, int]:
    """Choose the KV tokens per block and the launch options: the fastest of those tried on an H200.

    block_n: the most tokens; row_bytes: of a token's key and value in the query's dtype; tokens: per split,
    approximately; alone: whether no SM has two programs. wgmma: see `Room`. Without it, registers also hold the
    operands of 64 rows, and run out with larger tiles.

    A program of a block or two is bound by the latency of its loads: a pipeline only adds to that, and more warps keep
    more loads in flight.
    """
    while tokens <= block_n // 2 and block_n > 16:
        block_n //= 2
    few = tokens <= 2 * block_n
    stages, warps = 1 if few else 2, 8 if few and alone and block_m == 16 else 4
    if block_m == 64 and not wgmma:
        block_n, warps = min(block_n, 32), 8 if row_bytes >= 512 else 4
    return {"BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}


def prompt_tile(*, row_bytes: int, block_m: int, wgmma: bool) -> dict[str, int]:
    """Choose what `tile_config` does, for prompts."""
    if row_bytes <= 512 if wgmma else row_bytes < 512:
        # Small tiles leave room for more programs on an SM: while one takes exponentials, another multiplies.
        block_n, warps, stages = 32, 4, 2
    elif block_m > _MOST_ROWS:
        # Heads of 256 dims: 281 teraflops a second; in tiles of 64 rows and 32 tokens, 118 (H200).
        block_n, warps, stages = 64, 8, 2
    else:
        # With a third stage, a block's page numbers are there before its tokens are asked for.
        block_n, warps, stages = 64 if row_bytes <= 512 else 32 if row_bytes <= 1024 else 16, 8, 3 if wgmma else 2
    return {"BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}


paged_attention = define_op("attn_backends::paged_attention", PagedAttentionArguments)


@triton.jit
def attention_kernel(
    q_ptr,  # [T, Hq, D]
    k_cache_ptr,  # [pages, page_size, Hkv, D]
    v_cache_ptr,  # [pages, page_size, Hkv, Dv]
    block_table_ptr,  # int32 [R, max_pages]
    seq_lens_ptr,  # int32 [R]
    query_start_loc_ptr,  # int32 [R + 1]
    sinks_ptr,  # fp32 [Hq], or None
    tree_masks_ptr,  # int64 [T], or None: which query tokens each one sees
    k_scale_ptr,  # fp32 [1] or [Hkv]; not read unless HAS_SCALES
    v_scale_ptr,  # likewise
    o_ptr,  # out: [T, Hq, Dv]; with more than one split fp32 [S, T, Hq, Dv]
    lse_ptr,  # out: fp32 [S, T, Hq], log2 of each split's sum of exponentials; not written for one split
    sm_scale,  # factor on q.k
    softcap,  # not read unless HAS_SOFTCAP
    num_m_blocks,  # per request
    num_tokens,  # T
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
    HEADS: tl.constexpr,  # Hq
    GROUP: tl.constexpr,  # G
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # D
    VALUE_DIM: tl.constexpr,  # Dv
    BLOCK_D: tl.constexpr,  # D, rounded up to a power of two
    BLOCK_DV: tl.constexpr,  # Dv, likewise
    BLOCK_M: tl.constexpr,  # M
    BLOCK_N: tl.constexpr,  # N
    NUM_SPLITS: tl.constexpr,  # S
    SPLIT_BLOCKS: tl.constexpr,  # blocks per split; 0 divides them equally
    SLIDING_WINDOW: tl.constexpr,  # tokens that a query sees, itself included; 0 is all
    IS_CAUSAL: tl.constexpr,
    TREE: tl.constexpr,  # query tokens see each other by tree_masks
    WHOLE_BLOCKS: tl.constexpr,  # a loop of its own for blocks that all rows see: see _whole_blocks
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HEAD_SCALES: tl.constexpr,  # one for each KV head
    WIDE_PAGES: tl.constexpr,  # whether an offset within a page can need 64 bits
    FP32_DOT: tl.constexpr,  # multiply in fp32, for the interpreter
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """o = softmax(sm_scale q k^T, masked) v. One program per M query rows of a KV head and split of KV tokens.

    Grid [R * num_m_blocks, Hkv, S]. For each row the program keeps the running maximum m_i of the scores qk, the sum
    l_i of p = 2^(qk - m_i), and the sum acc of p v; alpha = 2^(m_i - m_ij) rescales both to a new maximum m_ij.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    M_INIT: tl.constexpr = -3.0e38  # finite: in a row that sees no token of a block, -inf - (-inf) would be NaN
    await_previous(PDL)
    # 1. The request, block of rows, KV head and split of this program
    request = tl.program_id(0) // num_m_blocks
    m_block = tl.program_id(0) % num_m_blocks
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    q_start = tl.load(query_start_loc_ptr + request)
    q_len = tl.load(query_start_loc_ptr + request + 1) - q_start
    # Loaded before the branch, so that this load is in flight while the branch waits for those above.
    seq_len = length_within(tl.load(seq_lens_ptr + request), max_len)  # 0 for a padding request
    if m_block * BLOCK_M >= q_len * GROUP:
        return

    # 2. The query token, head and position of each row
    offs_m = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < q_len * GROUP
    q_token = (q_start + offs_m // GROUP).to(tl.int64)
    head = kv_head * GROUP + offs_m % GROUP
    context_len = seq_len - q_len
    q_pos = context_len + offs_m // GROUP
    if TREE:
        ancestors = tl.load(tree_masks_ptr + q_token, mask=mask_m, other=0)
        # A query's depth in its tree is its number of ancestors, itself included. A token without a mask yet (0) comes
        # out one before the root, and its window too; kv_start below cuts that token off, so the query sees the context
        # that the root sees, as in the reference.
        q_pos = context_len + _popcount(ancestors) - 1
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)

    # 3. The KV tokens visible to the rows of this tile, kv_start to kv_end, and this split's blocks of them, lo to hi.
    # A padding request, with seq_len 0, has no keys: its range is empty and its rows are 0.
    last_row = tl.minimum(m_block * BLOCK_M + BLOCK_M, q_len * GROUP) - 1
    kv_end = tl.where(seq_len > 0, context_len + last_row // GROUP + 1, 0)
    kv_start = 0
    if SLIDING_WINDOW > 0:
        kv_start = tl.maximum(context_len + (m_block * BLOCK_M) // GROUP - SLIDING_WINDOW + 1, 0)
    if not IS_CAUSAL:
        kv_end = seq_len
    if TREE:  # query order gives neither depth nor visibility: take the widest range
        kv_end = seq_len
        if SLIDING_WINDOW > 0:
            kv_start = tl.maximum(context_len - SLIDING_WINDOW + 1, 0)  # the root's window
    n_block_min = kv_start // BLOCK_N
    num_n_blocks = tl.cdiv(kv_end, BLOCK_N) - n_block_min
    lo, hi = split_range(n_block_min, num_n_blocks, split, NUM_SPLITS, SPLIT_BLOCKS)

    # 4. Load q; start the online softmax
    q = tl.load(
        q_ptr + q_token[:, None] * stride_q_token + head.to(tl.int64)[:, None] * stride_q_head + offs_d[None, :],
        mask=mask_m[:, None] & (offs_d[None, :] < HEAD_DIM),
        other=0.0,
    )
    if FP32_DOT:
        q = q.to(tl.float32)
    if HAS_SCALES:
        sm_scale *= tl.load(k_scale_ptr + kv_head * HEAD_SCALES)
    m_i = tl.full((BLOCK_M,), M_INIT, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    table_ptr = block_table_ptr + request.to(tl.int64) * stride_block_table
    k_cache_ptr += kv_head.to(tl.int64) * stride_k_head
    v_cache_ptr += kv_head.to(tl.int64) * stride_v_head
    if WHOLE_BLOCKS:
        # Scores stay unscaled until they are exponents: one operation for both.
        factor = sm_scale * LOG2_E
        if TREE:
            seen_by_all = context_len
        elif IS_CAUSAL:
            seen_by_all = context_len + (m_block * BLOCK_M) // GROUP + 1  # the first row sees the fewest tokens
        else:
            seen_by_all = kv_end
        whole = tl.maximum(lo, tl.minimum(hi, seen_by_all // BLOCK_N))
        for n_block in range(lo, whole):
            offs_n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
            page_offset = offs_n % PAGE_SIZE
            if WIDE_PAGES:
                page_offset = page_offset.to(tl.int64)
            page = tl.load(table_ptr + offs_n // PAGE_SIZE).to(tl.int64)
            k_ptrs = k_cache_ptr + (page * stride_k_page + page_offset * stride_k_token)[None, :] + offs_d[:, None]
            v_ptrs = v_cache_ptr + (page * stride_v_page + page_offset * stride_v_token)[:, None] + offs_dv[None, :]
            k = widened(tl.load(k_ptrs, mask=offs_d[:, None] < HEAD_DIM, other=0.0), q.dtype)
            v = widened(tl.load(v_ptrs, mask=offs_dv[None, :] < VALUE_DIM, other=0.0), q.dtype)
            qk = tl.dot(q, k, input_precision="ieee")
            m_ij = tl.maximum(m_i, tl.max(qk, 1) * factor)
            p = tl.exp2(qk * factor - m_ij[:, None])
            alpha = tl.exp2(m_i - m_ij)
            l_i = l_i * alpha + tl.sum(p, 1)
            acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            m_i = m_ij
        lo = whole
    for n_block in range(lo, hi):
        # 5a. Load k [D, N] and v [N, Dv]
        offs_n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < kv_end
        if SLIDING_WINDOW > 0:  # an older token's page can belong to another request by now, or hold NaN
            mask_n = mask_n & (offs_n >= kv_start)
        page_offset = offs_n % PAGE_SIZE
        if WIDE_PAGES:  # conditional because it costs up to 40 % of the time
            page_offset = page_offset.to(tl.int64)
        page = tl.load(table_ptr + offs_n // PAGE_SIZE, mask=mask_n, other=0).to(tl.int64)
        k = tl.load(
            k_cache_ptr + (page * stride_k_page + page_offset * stride_k_token)[None, :] + offs_d[:, None],
            mask=mask_n[None, :] & (offs_d[:, None] < HEAD_DIM),
            other=0.0,
        )
        v = tl.load(
            v_cache_ptr + (page * stride_v_page + page_offset * stride_v_token)[:, None] + offs_dv[None, :],
            mask=mask_n[:, None] & (offs_dv[None, :] < VALUE_DIM),
            other=0.0,
        )
        k = widened(k, q.dtype)
        v = widened(v, q.dtype)
        # 5b. qk [M, N], capped and masked. "ieee" keeps fp32 operands from being rounded to TF32.
        qk = tl.dot(q, k, input_precision="ieee") * sm_scale
        if HAS_SOFTCAP:
            qk = apply_softcap(qk, softcap)
        qk = qk * LOG2_E  # not folded into sm_scale: the cap applies to exponents of e
        if TREE:
            q_index = offs_n - context_len  # the query token at each KV token; below 0: the cached prefix
            qk_mask = seen_in_tree(ancestors[:, None], q_index[None, :]) & mask_n[None, :]
        elif IS_CAUSAL:
            # No mask_n: a query sees up to its own position; the last one's is kv_end - 1. Padding rows are not stored.
            qk_mask = offs_n[None, :] <= q_pos[:, None]
        else:
            qk_mask = mask_n[None, :]
        if SLIDING_WINDOW > 0:
            qk_mask = qk_mask & (offs_n[None, :] > q_pos[:, None] - SLIDING_WINDOW)
        qk = tl.where(qk_mask, qk, float("-inf"))
        # 5c. p [M, N], and the online softmax's update
        m_ij = tl.maximum(m_i, tl.max(qk, 1))
        p = tl.exp2(qk - m_ij[:, None])
        alpha = tl.exp2(m_i - m_ij)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m_i = m_ij

    # 6. A sink adds to l_i only; with several splits the merge adds it
    if HAS_SINKS:
        sink = sink_exponent(tl.load(sinks_ptr + head, mask=mask_m, other=0.0))
        m_ij = tl.maximum(m_i, sink)
        alpha = tl.exp2(m_i - m_ij)
        l_i = l_i * alpha + tl.exp2(sink - m_ij)
        acc = acc * alpha[:, None]
    if HAS_SCALES:
        acc *= tl.load(v_scale_ptr + kv_head * HEAD_SCALES)
    # 7. Divide and store. The test is for equality, so that a NaN is not taken for an empty row, here and in the merge.
    acc = acc / tl.where(l_i == 0, 1.0, l_i)[:, None]
    row_offs = (split.to(tl.int64) * num_tokens + q_token) * HEADS + head
    tl.store(
        o_ptr + row_offs[:, None] * VALUE_DIM + offs_dv[None, :],
        acc.to(o_ptr.dtype.element_ty),
        mask=mask_m[:, None] & (offs_dv[None, :] < VALUE_DIM),
    )
    if NUM_SPLITS > 1:  # a row that saw no token of this split gets -inf, by log2(0)
        tl.store(lse_ptr + row_offs, m_i + tl.log2(l_i), mask=mask_m)


@triton.jit
def length_within(seq_len, max_len):
    """Return seq_len, or 0 if it is negative or beyond max_len, where the block table has no entries."""
    return tl.where((seq_len >= 0) & (seq_len <= max_len), seq_len, 0)


@triton.jit
def seen_in_tree(ancestors, query_token):
    """Return whether a query token with this int64 mask of ancestors sees the request's query token of this index.
    Indices below 0 are the cached prefix, which every query sees. The two broadcast."""
    bit = tl.minimum(tl.maximum(query_token, 0), 63).to(tl.int64)  # the caller hides tokens beyond the tree
    return (query_token < 0) | ((ancestors >> bit) & 1 != 0)


@triton.jit
def _popcount(word):
    """Count the set bits of each int64, as int32, by summing pairs, nibbles and bytes in parallel.

    Written out because the interpreter runs no libdevice function.
    """
    x = word.to(tl.uint64)
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def split_range(
    n_block_min,  # first block of the visible range
    num_n_blocks,  # blocks of the visible range
    split,
    NUM_SPLITS: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,  # blocks per split; 0 divides them equally
):
    """Return the block range [lo, hi) of a split: an equal share, rounded up, or SPLIT_BLOCKS and the rest in the last
    split.

    With too few blocks, late splits are empty: lo can then exceed hi.
    """
    n_block_end = n_block_min + num_n_blocks
    if SPLIT_BLOCKS > 0:
        lo = n_block_min + split * SPLIT_BLOCKS
        hi = tl.where(split == NUM_SPLITS - 1, n_block_end, tl.minimum(lo + SPLIT_BLOCKS, n_block_end))
    else:
        share = tl.cdiv(num_n_blocks, NUM_SPLITS)
        lo = n_block_min + split * share
        hi = tl.minimum(lo + share, n_block_end)
    return lo, hi


@triton.jit
def merge_kernel(
    o_partial_ptr,  # fp32 [S, T, Hq, Dv]; can be unwritten, and hold NaN, for a split whose lse is -inf
    lse_ptr,  # fp32 [S, T, Hq], log2 of each split's sum of exponentials
    sinks_ptr,  # fp32 [Hq], or None
    o_ptr,  # out: [T, Hq, Dv]
    num_tokens,  # T
    HEADS: tl.constexpr,  # Hq
    VALUE_DIM: tl.constexpr,  # Dv
    BLOCK_DV: tl.constexpr,  # dims per program
    NUM_SPLITS: tl.constexpr,  # S
    BLOCK_S: tl.constexpr,  # S, rounded up to a power of two
    HAS_SINKS: tl.constexpr,
    IN_ORDER: tl.constexpr,  # add the splits one after another
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """o = sum of 2^lse_i o_i / (sum of 2^lse_i + e^sink) over the splits i. One program per BLOCK_DV dims of a head
    of a query token.

    Grid [T, Hq, Dv / BLOCK_DV, rounded up]. IN_ORDER: splits are added one after another, so those without tokens
    change no bit of the sum.
    """
    M_INIT: tl.constexpr = -3.0e38  # finite, for when no split saw a token
    await_previous(PDL)
    q_token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, BLOCK_S)
    offs_dv = tl.program_id(2) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    # 1. Load each split's lse [S] and o [S, Dv]; with IN_ORDER, the loop in step 3 loads o
    offs = (split.to(tl.int64) * num_tokens + q_token) * HEADS + head
    lse = tl.load(lse_ptr + offs, mask=split < NUM_SPLITS, other=float("-inf"))
    if not IN_ORDER:
        # Not masked by the result of the load above, so that both are in flight at once.
        o = tl.load(
            o_partial_ptr + offs[:, None] * VALUE_DIM + offs_dv[None, :],
            mask=(split < NUM_SPLITS)[:, None] & (offs_dv[None, :] < VALUE_DIM),
            other=0.0,
        )
    # 2. The largest exponent
    m_all = tl.max(lse, 0)
    if HAS_SINKS:
        sink = sink_exponent(tl.load(sinks_ptr + head))
        m_all = tl.maximum(m_all, sink)
    m_all = tl.maximum(m_all, M_INIT)
    # 3. The weighted sum of the outputs, and the sum of the weights
    if IN_ORDER:
        acc = tl.zeros((BLOCK_DV,), tl.float32)
        l_all = tl.zeros((BLOCK_DV,), tl.float32)
        for split_i in range(NUM_SPLITS):
            row_i = (split_i * num_tokens + q_token) * HEADS + head
            lse_i = tl.load(lse_ptr + row_i)
            o_i = tl.load(o_partial_ptr + row_i * VALUE_DIM + offs_dv, mask=offs_dv < VALUE_DIM, other=0.0)
            w_i = tl.exp2(lse_i - m_all) + tl.zeros_like(o_i)  # [BLOCK_DV], like tl.fma's other operands
            l_all += w_i
            acc = tl.fma(tl.where(lse_i == float("-inf"), 0.0, o_i), w_i, acc)
    else:
        w = tl.exp2(lse - m_all)
        l_all = tl.sum(w, 0)
        o = tl.where((lse == float("-inf"))[:, None], 0.0, o)
        acc = tl.sum(o * w[:, None], 0)
    if HAS_SINKS:
        l_all += tl.exp2(sink - m_all)
    # 4. Divide and store
    acc = acc / tl.where(l_all == 0, 1.0, l_all)
    o_ptrs = o_ptr + (q_token * HEADS + head) * VALUE_DIM + offs_dv
    tl.store(o_ptrs, acc.to(o_ptr.dtype.element_ty), mask=offs_dv < VALUE_DIM)
