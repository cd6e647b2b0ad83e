"""The Triton kernels of sample_draft; sample_draft.py holds their contract."""

from __future__ import annotations

from builders.kernels.triton_runtime import await_previous, tl, triton
from spec_decode.sampling.noise import triton_gumbel, triton_key


@triton.jit
def block_argmax_kernel(
    logits,
    temperature,
    seeds,
    positions,
    step,
    draft_logits,
    peak,
    top,
    mass,
    index,
    min_confidence,
    continue_flag,
    token_map,
    hidden,
    next_hidden,
    vocab,
    columns,
    logits_stride,
    cache_row_stride,
    cache_column_stride,
    hidden_stride,
    next_hidden_stride,
    STREAM: tl.constexpr,
    AHEAD: tl.constexpr,
    MAPPED: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    # Every load stands before the first store: behind one that may alias it, a load would start only when that is done.
    x = tl.load(logits + row * logits_stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    token = at
    if MAPPED:
        token = tl.load(token_map + at, mask=inside, other=0)
    heat = tl.load(temperature + row)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    column = tl.load(step)
    least = tl.load(min_confidence)
    if WIDTH > 0:
        dim = block * SHARE + tl.arange(0, SHARE)
        state = tl.load(hidden + row * hidden_stride + dim, mask=dim < WIDTH)
        tl.store(next_hidden + row * next_hidden_stride + dim, state, mask=dim < WIDTH)
    hot = heat > 0
    if hot:
        x = tl.div_rn(x, heat)
    filed = draft_logits + row * cache_row_stride + column * cache_column_stride + token
    tl.store(filed, x, mask=inside & (column < columns))
    part = row * tl.num_programs(1) + block
    if (row == 0) & (block == 0):
        # The kernel behind this one sets it where a row goes on.
        tl.store(continue_flag, 0)
    if least > 0:
        highest = tl.max(x, 0)
        # A block of -inf alone has no mass; -inf minus itself would make it NaN.
        tl.store(top + part, highest)
        tl.store(mass + part, tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - highest)), 0))
    if hot:
        x = x + triton_gumbel(triton_key(seed, position + AHEAD, STREAM), token)
    best, first = tl.max(x, 0, return_indices=True)
    tl.store(peak + part, best)
    tl.store(index + part, block * BLOCK + first)


@triton.jit
def file_token_kernel(
    logits,
    temperature,
    peak,
    top,
    mass,
    index,
    seq_lens,
    step,
    draft_tokens,
    next_ids,
    draft_lens,
    num_tokens,
    min_confidence,
    continue_flag,
    token_map,
    vocab,
    logits_stride,
    tokens_stride,
    columns,
    blocks,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    inside = block < blocks
    part = row * blocks + block
    seq_len = tl.load(seq_lens + row)
    column = tl.load(step)
    length = tl.minimum(tl.minimum(tl.load(draft_lens + row), tl.load(num_tokens)), columns)
    least = tl.load(min_confidence)
    _, chosen = first_best(peak + part, index + part, inside)
    # Where every logit is NaN none was found; the token must lie in the vocabulary all the same.
    chosen = tl.minimum(chosen, vocab - 1).to(tl.int64)
    token = chosen
    if MAPPED:
        token = tl.load(token_map + chosen)
    proposes = (seq_len > 0) & (column < length)
    goes_on = proposes & (column + 1 < length)
    if least > 0:
        tops = tl.load(top + part, mask=inside, other=float("-inf"))
        highest = tl.max(tops, 0)
        masses = tl.load(mass + part, mask=inside, other=0.0)
        total = tl.sum(tl.where(masses > 0, masses * tl.exp(tops - highest), 0.0), 0)
        heat = tl.load(temperature + row)
        score = tl.load(logits + row * logits_stride + chosen).to(tl.float32)
        score = tl.div_rn(score, tl.where(heat > 0, heat, 1.0))
        goes_on = goes_on & (tl.div_rn(tl.exp(score - highest), total) >= least)
    filed = draft_tokens + row * tokens_stride
    if column == 0:
        others = tl.arange(0, BLOCK_K)
        tl.store(filed + others, -1, mask=(others > 0) & (others < columns))
    tl.store(filed + column, tl.where(proposes, token, -1), mask=column < columns)
    tl.store(next_ids + row, tl.where(proposes, token, 0))
    tl.store(seq_lens + row, tl.where(goes_on, seq_len, 0))
    tl.store(continue_flag, 1, mask=goes_on)


@triton.jit
def first_best(peak, index, inside):
    """The largest of the blocks' peaks, and the least of their indices that has it."""
    x = tl.load(peak, mask=inside, other=float("-inf"))
    at = tl.load(index, mask=inside, other=2147483647)
    best = tl.max(x, 0)
    return best, tl.min(tl.where(x == best, at, 2147483647), 0)
