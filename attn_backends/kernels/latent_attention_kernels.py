"""The Triton kernel of latent attention; latent_attention.py holds its contract and the shape legend."""

from __future__ import annotations

from attn_backends.kernels.paged_attention_kernels import length_within, seen_in_tree, split_range
from builders.kernels.triton_runtime import await_previous, tl, triton


@triton.jit
def latent_attention_kernel(
    query, latent_cache, block_table, seq_lens, query_start_loc, tree_masks, out, lse, scale, tiles, tokens, longest,
    q_token_stride, q_head_stride, page_stride, token_stride, table_stride,
    HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, VALUE_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, SPLIT_BLOCKS: tl.constexpr,
    CAUSAL: tl.constexpr, TREE: tl.constexpr, WIDE_PAGES: tl.constexpr, FP32_DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    # Tiles of one request are neighbours: they run at the same time and share its latents in the L2 cache.
    request = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    split = tl.program_id(1)
    first = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - first
    if tile * BLOCK_M >= query_len * HEADS:
        return
    seq_len = length_within(tl.load(seq_lens + request), longest)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_row = row < query_len * HEADS
    token = (first + row // HEADS).to(tl.int64)
    head = row % HEADS
    cached = seq_len - query_len
    position = cached + row // HEADS
    if TREE:
        ancestors = tl.load(tree_masks + token, mask=in_row, other=0)
    value_dim = tl.arange(0, VALUE_DIM)
    rotary_dim = VALUE_DIM + tl.arange(0, ROTARY_DIM)
    at = (split.to(tl.int64) * tokens + token) * HEADS + head

    # A padding row has no keys: its range ends at 0 or before, and its output is 0.
    last_row = tl.minimum(tile * BLOCK_M + BLOCK_M, query_len * HEADS) - 1
    end = cached + last_row // HEADS + 1
    seen_by_all = cached + (tile * BLOCK_M) // HEADS + 1
    if not CAUSAL:
        end = seq_len
        seen_by_all = seq_len
    if TREE:  # any token may be the root's child, and any may be seen
        end = seq_len
        seen_by_all = cached
    blocks = tl.cdiv(end, BLOCK_N)
    lo, hi = split_range(0, blocks, split, SPLITS, SPLIT_BLOCKS)
    # The loop below runs at least once: on a path around it, ptxas would wait for every single wgmma.
    if lo >= hi:
        if SPLITS > 1:
            tl.store(lse + at, tl.full((BLOCK_M,), float("-inf"), tl.float32), mask=in_row)
        else:
            nothing = tl.zeros((BLOCK_M, VALUE_DIM), out.dtype.element_ty)
            tl.store(out + at[:, None] * VALUE_DIM + value_dim[None, :], nothing, mask=in_row[:, None])
        return

    q = query + (token * q_token_stride + head.to(tl.int64) * q_head_stride)[:, None]
    q_value = tl.load(q + value_dim[None, :], mask=in_row[:, None], other=0.0)
    q_rotary = tl.load(q + rotary_dim[None, :], mask=in_row[:, None], other=0.0)
    if FP32_DOT:
        q_value = q_value.to(tl.float32)
        q_rotary = q_rotary.to(tl.float32)
    scale *= 1.4426950408889634
    # Finite, so that a row which sees none of this split's tokens takes no infinity from another.
    peak = tl.full((BLOCK_M,), -3.0e38, tl.float32)
    # Summed over a row after the loop, since a row is spread over several warps.
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = tl.zeros((BLOCK_M, VALUE_DIM), tl.float32)
    table = block_table + request.to(tl.int64) * table_stride
    page = _pages(table, lo, end, PAGE_SIZE, BLOCK_N)
    for block in range(lo, hi):
        kv = block * BLOCK_N + tl.arange(0, BLOCK_N)
        owned = (kv < end)[:, None]
        offset = kv % PAGE_SIZE
        if WIDE_PAGES:  # where this is not needed, it costs up to 9 % of the time
            offset = offset.to(tl.int64)
        latent = latent_cache + (page.to(tl.int64) * page_stride + offset * token_stride)[:, None]
        value = tl.load(latent + value_dim[None, :], mask=owned, other=0.0)
        rotary = tl.load(latent + rotary_dim[None, :], mask=owned, other=0.0)
        # One block ahead, so that no load of latents waits for its page.
        page = _pages(table, block + 1, end, PAGE_SIZE, BLOCK_N)
        if FP32_DOT:
            value = value.to(tl.float32)
            rotary = rotary.to(tl.float32)
        # Triton gives a product whose result flows into another product to the warps by rows alone, and two warpgroups
        # would each compute all 64 rows. Neither of these flows on: they are summed after scaling, then branched over.
        scores = tl.dot(q_rotary, tl.trans(rotary), input_precision="ieee") * scale
        scores += tl.dot(q_value, tl.trans(value), input_precision="ieee") * scale
        if (block + 1) * BLOCK_N > seen_by_all:
            if TREE:
                seen = seen_in_tree(ancestors[:, None], (kv - cached)[None, :]) & (kv < end)[None, :]
            elif CAUSAL:
                seen = kv[None, :] <= position[:, None]
            else:
                seen = (kv < end)[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade[:, None] + weights
        acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
        peak = new_peak

    sum_exp = tl.sum(total, 1)
    # By equality, so that a NaN is not taken for an empty row, here and in the merge.
    acc = acc / tl.where(sum_exp == 0, 1.0, sum_exp)[:, None]
    to = out + at[:, None] * VALUE_DIM + value_dim[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=in_row[:, None])
    if SPLITS > 1:
        tl.store(lse + at, peak + tl.log2(sum_exp), mask=in_row)


@triton.jit
def _pages(table, block, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of every token of a block below `end`; a single number where a block lies within one page."""
    token = block * BLOCK_N
    if PAGE_SIZE % BLOCK_N != 0:
        token += tl.arange(0, BLOCK_N)
    return tl.load(table + token // PAGE_SIZE, mask=token < end, other=0)
