"""Attention over a paged cache: one kernel for decode and extend, split over KV tokens, and the merge.

Shape legend: T query tokens, R requests, H query heads, K KV heads, G = H / K query heads a KV head, D head dim,
E value dim, S splits, M rows of a tile (query token x head of the group), N KV tokens of a block.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from attn_backends.kernels.softmax import softmax_with_sinks
from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
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
            # A token that has no mask yet stands where the root does.
            position = cached + (bits.sum(1, keepdim=True) - 1).clamp(min=0)
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
            query,
            *self[1:8],
            partial,
            lse,
            self.scale,
            self.soft_cap or 0.0,
            tiles,
            tokens,
            self.longest,
            *query.stride()[:2],
            *self.key_cache.stride()[:3],
            *self.value_cache.stride()[:3],
            self.block_table.stride(0),
            HEADS=heads,
            GROUP=group,
            PAGE_SIZE=page_size,
            DIM=dim,
            VALUE_DIM=value_dim,
            BLOCK_D=block_d,
            BLOCK_E=block_e,
            BLOCK_M=block_m,
            SPLITS=splits,
            SPLIT_BLOCKS=SPLIT_TOKENS // tile["BLOCK_N"] if fixed else 0,
            WINDOW=self.sliding_window or 0,
            CAUSAL=self.causal,
            TREE=self.tree_masks is not None,
            SOFT_CAP=bool(self.soft_cap),
            SINKS=sinks is not None and not split,
            WIDE_PAGES=page_size * max(self.key_cache.stride(1), self.value_cache.stride(1)) >= 1 << 31,
            FP32_DOT=interpreted,
            **tile,
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
                BLOCK_E=block_e,
                SPLITS=splits,
                BLOCK_S=triton.next_power_of_2(splits),
                SINKS=sinks is not None,
                IN_ORDER=fixed,
                num_warps=2,
                **dependent_launch(query.device),
            )
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


@triton.jit
def attention_kernel(
    query,  # [T, H, D]
    key_cache,  # [pages, page_size, K, D]
    value_cache,  # [pages, page_size, K, E]
    block_table,  # int32 [R, max_pages]
    seq_lens,  # int32 [R]
    query_start_loc,  # int32 [R + 1]
    sinks,  # fp32 [H], or None
    tree_masks,  # int64 [T], or None: which query tokens each one sees
    out,  # out: [T, H, E]; of more than one split fp32 [S, T, H, E]
    lse,  # out: fp32 [S, T, H], log2 of each split's sum of exponentials; not written for one split
    scale,  # of q.k
    soft_cap,  # not read unless SOFT_CAP
    tiles,  # of a request
    tokens,  # T
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
    HEADS: tl.constexpr,  # H
    GROUP: tl.constexpr,  # G
    PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr,  # D
    VALUE_DIM: tl.constexpr,  # E
    BLOCK_D: tl.constexpr,  # D, rounded up to a power of two
    BLOCK_E: tl.constexpr,  # E, likewise
    BLOCK_M: tl.constexpr,  # M
    BLOCK_N: tl.constexpr,  # N
    SPLITS: tl.constexpr,  # S
    SPLIT_BLOCKS: tl.constexpr,  # blocks of a split; 0 shares them out equally
    WINDOW: tl.constexpr,  # tokens that a query sees, itself included; 0 is all
    CAUSAL: tl.constexpr,
    TREE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    WIDE_PAGES: tl.constexpr,  # whether an offset within a page may need 64 bits
    FP32_DOT: tl.constexpr,  # multiply in fp32, for the interpreter
    PDL: tl.constexpr,
):
    """One program computes M query rows of one KV head over one split of their request's KV tokens.

    Its grid is [R * tiles, K, S]. It walks the split in blocks of N tokens and keeps a running softmax: `peak` is the
    largest score so far, `total` the sum of exponentials and `acc` the weighted values, both relative to `peak`; `fade`
    brings them to a new peak. Scores are exponents of 2.
    """
    await_previous(PDL)
    # The request, tile, KV head and split of this program
    request = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    first = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - first
    # After the branch it would wait for the loads above.
    seq_len = length_within(tl.load(seq_lens + request), longest)
    if tile * BLOCK_M >= query_len * GROUP:
        return

    # The query token, head and position of each row
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_row = row < query_len * GROUP
    token = (first + row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    cached = seq_len - query_len
    position = cached + row // GROUP
    if TREE:
        ancestors = tl.load(tree_masks + token, mask=in_row, other=0)
        position = cached + _bits_set(ancestors) - 1
    dim = tl.arange(0, BLOCK_D)
    edim = tl.arange(0, BLOCK_E)

    # The range of KV tokens that any row of this tile sees, and this split's blocks of it. A padding row has no keys:
    # its range is empty and its output is 0.
    last_row = tl.minimum(tile * BLOCK_M + BLOCK_M, query_len * GROUP) - 1
    end = tl.where(seq_len > 0, cached + last_row // GROUP + 1, 0)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(cached + (tile * BLOCK_M) // GROUP - WINDOW + 1, 0)
    if not CAUSAL:
        end = seq_len
    if TREE:  # any token may be the root's child, and any may be seen
        end = seq_len
        if WINDOW > 0:
            start = tl.maximum(cached - WINDOW + 1, 0)  # the root's window
    first_block = start // BLOCK_N
    blocks = tl.cdiv(end, BLOCK_N) - first_block
    lo, hi = split_range(first_block, blocks, split, SPLITS, SPLIT_BLOCKS)

    # The queries, and the running softmax
    q = tl.load(
        query + token[:, None] * q_token_stride + head.to(tl.int64)[:, None] * q_head_stride + dim[None, :],
        mask=in_row[:, None] & (dim[None, :] < DIM),
        other=0.0,
    )
    if FP32_DOT:
        q = q.to(tl.float32)
    # Finite, so that a row which sees none of a block's tokens takes no infinity from another.
    peak = tl.full((BLOCK_M,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    table = block_table + request.to(tl.int64) * table_stride
    key_cache += kv_head.to(tl.int64) * k_head_stride
    value_cache += kv_head.to(tl.int64) * v_head_stride
    for block in range(lo, hi):
        # Keys and values of one block
        kv = block * BLOCK_N + tl.arange(0, BLOCK_N)
        owned = kv < end
        if WINDOW > 0:  # an older token's page may be another request's by now, or hold NaN
            owned = owned & (kv >= start)
        offset = kv % PAGE_SIZE
        if WIDE_PAGES:  # where this is not needed, it costs up to 40 % of the time
            offset = offset.to(tl.int64)
        page = tl.load(table + kv // PAGE_SIZE, mask=owned, other=0).to(tl.int64)
        k = tl.load(
            key_cache + (page * k_page_stride + offset * k_token_stride)[None, :] + dim[:, None],
            mask=owned[None, :] & (dim[:, None] < DIM),
            other=0.0,
        )
        v = tl.load(
            value_cache + (page * v_page_stride + offset * v_token_stride)[:, None] + edim[None, :],
            mask=owned[:, None] & (edim[None, :] < VALUE_DIM),
            other=0.0,
        )
        if FP32_DOT:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        # Their scores, soft_cap * tanh(score / soft_cap) where there is a cap
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if SOFT_CAP:
            ratio = tl.exp2(-2.8853900817779268 * tl.abs(scores / soft_cap))  # 2 * log2(e)
            scores = soft_cap * tl.where(scores >= 0, 1.0, -1.0) * (1.0 - ratio) / (1.0 + ratio)
        scores = scores * 1.4426950408889634  # log2(e)
        # Hide what a row does not see
        if TREE:
            seen = seen_in_tree(ancestors[:, None], (kv - cached)[None, :]) & owned[None, :]
        elif CAUSAL:
            seen = kv[None, :] <= position[:, None]
        else:
            seen = owned[None, :]
        if WINDOW > 0:
            seen = seen & (kv[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        # The running softmax takes the block in
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = new_peak

    # The sink adds to the sum alone
    if SINKS:
        sink = finite_above(tl.load(sinks + head, mask=in_row, other=0.0))
        new_peak = tl.maximum(peak, sink)
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.exp2(sink - new_peak)
        acc = acc * fade[:, None]
    # Divide and store. By equality, so that a NaN is not taken for an empty row, here and in the merge.
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    at = (split.to(tl.int64) * tokens + token) * HEADS + head
    tl.store(
        out + at[:, None] * VALUE_DIM + edim[None, :],
        acc.to(out.dtype.element_ty),
        mask=in_row[:, None] & (edim[None, :] < VALUE_DIM),
    )
    if SPLITS > 1:
        tl.store(lse + at, peak + tl.log2(total), mask=in_row)


@triton.jit
def length_within(seq_len, longest):
    """seq_len, or 0 where it is negative or beyond `longest`: the block table has no entries there."""
    return tl.where((seq_len >= 0) & (seq_len <= longest), seq_len, 0)


@triton.jit
def seen_in_tree(ancestors, query_token):
    """Whether query tokens with these ancestors, int64, see those of these numbers; below 0 stands what was cached."""
    bit = tl.minimum(tl.maximum(query_token, 0), 63).to(tl.int64)
    return (query_token < 0) | ((ancestors >> bit) & 1 != 0)


@triton.jit
def _bits_set(word):
    """How many bits of each int64 are set, as int32: pairs, nibbles and bytes are summed side by side."""
    x = word.to(tl.uint64)
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def split_range(
    first_block,  # of the visible range
    blocks,  # of the visible range
    split,
    SPLITS: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,  # blocks of a split; 0 shares them out equally
):
    """The blocks of a split, from and to: an equal share of them, or SPLIT_BLOCKS where that is not 0; the last split
    then has the rest."""
    end = first_block + blocks
    if SPLIT_BLOCKS > 0:
        lo = first_block + split * SPLIT_BLOCKS
        hi = tl.where(split == SPLITS - 1, end, tl.minimum(lo + SPLIT_BLOCKS, end))
    else:
        share = tl.cdiv(blocks, SPLITS)
        lo = first_block + split * share
        hi = tl.minimum(lo + share, end)
    return lo, hi


@triton.jit
def finite_above(sink):
    """A sink as an exponent of 2. One of +inf becomes finite and outweighs every score, without inf - inf."""
    return tl.where(sink > 1e30, 1e30, sink * 1.4426950408889634)  # log2(e)


@triton.jit
def merge_kernel(
    partial,  # fp32 [S, T, H, E]
    lse,  # fp32 [S, T, H], log2 of each split's sum of exponentials
    sinks,  # fp32 [H], or None
    out,  # out: [T, H, E]
    tokens,  # T
    HEADS: tl.constexpr,  # H
    VALUE_DIM: tl.constexpr,  # E
    BLOCK_E: tl.constexpr,  # E, rounded up to a power of two
    SPLITS: tl.constexpr,  # S
    BLOCK_S: tl.constexpr,  # S, likewise
    SINKS: tl.constexpr,
    IN_ORDER: tl.constexpr,  # add the splits one after another
    PDL: tl.constexpr,
):
    """One program merges the splits of one head of one query token: their outputs, weighted by their sums.

    IN_ORDER: splits are added one after another, so that those without tokens change no bit of the sum.
    """
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, BLOCK_S)
    edim = tl.arange(0, BLOCK_E)
    # The splits' sums, and their outputs
    at = (split.to(tl.int64) * tokens + token) * HEADS + head
    part = tl.load(lse + at, mask=split < SPLITS, other=float("-inf"))
    if not IN_ORDER:
        # Not masked by what the load above brings, so that both are under way at once.
        rows = tl.load(
            partial + at[:, None] * VALUE_DIM + edim[None, :],
            mask=(split < SPLITS)[:, None] & (edim[None, :] < VALUE_DIM),
            other=0.0,
        )
    # The largest exponent
    peak = tl.max(part, 0)
    if SINKS:
        sink = finite_above(tl.load(sinks + head))
        peak = tl.maximum(peak, sink)
    peak = tl.maximum(peak, -3.0e38)  # finite, where no split saw a token
    # The weighted sum of the outputs, and that of the weights
    if IN_ORDER:
        merged = tl.zeros((BLOCK_E,), tl.float32)
        total = tl.zeros((BLOCK_E,), tl.float32)
        for index in range(SPLITS):
            place = (index * tokens + token) * HEADS + head
            of_split = tl.load(lse + place)
            row = tl.load(partial + place * VALUE_DIM + edim, mask=edim < VALUE_DIM, other=0.0)
            share = tl.exp2(of_split - peak) + tl.zeros_like(row)
            total += share
            merged = tl.fma(tl.where(of_split == float("-inf"), 0.0, row), share, merged)
    else:
        weight = tl.exp2(part - peak)
        total = tl.sum(weight, 0)
        rows = tl.where((part == float("-inf"))[:, None], 0.0, rows)
        merged = tl.sum(rows * weight[:, None], 0)
    if SINKS:
        total += tl.exp2(sink - peak)
    # Divide and store
    merged = merged / tl.where(total == 0, 1.0, total)
    to = out + (token * HEADS + head) * VALUE_DIM + edim
    tl.store(to, merged.to(out.dtype.element_ty), mask=edim < VALUE_DIM)
