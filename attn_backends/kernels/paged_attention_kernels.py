"""The Triton kernels of paged attention; paged_attention.py holds their contract and the shape legend."""

from __future__ import annotations

from builders.kernels.triton_runtime import await_previous, tl, triton


@triton.jit
def attention_kernel(
    query, key_cache, value_cache, block_table, seq_lens, query_start_loc, sinks, tree_masks, out, lse, scale, soft_cap,
    tiles, tokens, longest, q_token_stride, q_head_stride, k_page_stride, k_token_stride, k_head_stride, v_page_stride,
    v_token_stride, v_head_stride, table_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, TREE: tl.constexpr,
    SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, WIDE_PAGES: tl.constexpr, FP32_DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
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

    # A padding row has no keys: its range is empty and its output is 0.
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
            start = tl.maximum(cached - WINDOW, 0)
    first_block = start // BLOCK_N
    blocks = tl.cdiv(end, BLOCK_N) - first_block
    lo, hi = split_range(first_block, blocks, split, SPLITS, SPLIT_BLOCKS)

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
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if SOFT_CAP:
            ratio = tl.exp2(-2.8853900817779268 * tl.abs(scores / soft_cap))
            scores = soft_cap * tl.where(scores >= 0, 1.0, -1.0) * (1.0 - ratio) / (1.0 + ratio)
        scores = scores * 1.4426950408889634
        if TREE:
            seen = seen_in_tree(ancestors[:, None], (kv - cached)[None, :]) & owned[None, :]
        elif CAUSAL:
            seen = kv[None, :] <= position[:, None]
        else:
            seen = owned[None, :]
        if WINDOW > 0:
            seen = seen & (kv[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = new_peak

    if SINKS:
        sink = finite_above(tl.load(sinks + head, mask=in_row, other=0.0))
        new_peak = tl.maximum(peak, sink)
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.exp2(sink - new_peak)
        acc = acc * fade[:, None]
    # By equality, so that a NaN is not taken for an empty row, here and in the merge.
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
def split_range(first_block, blocks, split, SPLITS: tl.constexpr, SPLIT_BLOCKS: tl.constexpr):
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
    return tl.where(sink > 1e30, 1e30, sink * 1.4426950408889634)


@triton.jit
def merge_kernel(
    partial, lse, sinks, out, tokens,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_E: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
    SINKS: tl.constexpr, IN_ORDER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """IN_ORDER: splits are added one after another, so that those without tokens change no bit of the sum."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, BLOCK_S)
    edim = tl.arange(0, BLOCK_E)
    at = (split.to(tl.int64) * tokens + token) * HEADS + head
    part = tl.load(lse + at, mask=split < SPLITS, other=float("-inf"))
    if not IN_ORDER:
        # Not masked by what the load above brings, so that both are under way at once.
        rows = tl.load(
            partial + at[:, None] * VALUE_DIM + edim[None, :],
            mask=(split < SPLITS)[:, None] & (edim[None, :] < VALUE_DIM),
            other=0.0,
        )
    peak = tl.max(part, 0)
    if SINKS:
        sink = finite_above(tl.load(sinks + head))
        peak = tl.maximum(peak, sink)
    peak = tl.maximum(peak, -3.0e38)
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
    merged = merged / tl.where(total == 0, 1.0, total)
    to = out + (token * HEADS + head) * VALUE_DIM + edim
    tl.store(to, merged.to(out.dtype.element_ty), mask=edim < VALUE_DIM)
