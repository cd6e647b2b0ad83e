"""Device functions of the verify kernels: read a row's draft, its probabilities under both models, its uniforms."""

from __future__ import annotations

from builders.kernels.triton_runtime import tl, triton
from spec_decode.sampling.kernels.vocab_blocks import merge_sum_exp
from spec_decode.sampling.noise import ACCEPT, triton_key, triton_uniform

_ACCEPT = tl.constexpr(ACCEPT)


@triton.jit
def read_draft(
    row,
    draft_tokens,  # int64 [R, K]
    columns,  # K
    BLOCK_K: tl.constexpr,
):
    """A row's draft int64 [BLOCK_K], -1 outside its K columns, and how many tokens it has before its end."""
    column = tl.arange(0, BLOCK_K)
    token = tl.load(draft_tokens + row * columns + column, mask=column < columns, other=-1)
    return token, tl.minimum(tl.min(tl.where(token < 0, column, columns), 0), columns)


@triton.jit
def matches_argmax(
    row,
    token,  # int64 [BLOCK_K]
    length,
    largest,  # fp32 [R * K, blocks], of p
    argmax,  # int32 [R * K, blocks]
    columns,  # K
    blocks,  # of the vocabulary
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Of a greedy row: which of its first `length` tokens are the target's argmax."""
    column = tl.arange(0, BLOCK_K)
    block = tl.arange(0, BLOCK)[None, :]
    part = (row * columns + column[:, None]) * blocks + block
    inside = (column < length)[:, None] & (block < blocks)
    x = tl.load(largest + part, mask=inside, other=float("-inf"))
    at = tl.load(argmax + part, mask=inside, other=2147483647)  # the largest int32
    best = tl.max(x, 1)
    return (token == tl.min(tl.where(x == best[:, None], at, 2147483647), 1)) & (column < length)


@triton.jit
def _store_norms(
    row,
    length,
    partial_max,  # fp32 [R * K, blocks], of one model
    partial_sum_exp,  # fp32 [R * K, blocks]
    norms,  # out: fp32 [2, R * K]
    columns,  # K
    blocks,  # of the vocabulary
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Of a random row's first `length` columns: the largest logit and the sum of exponentials, stored as Residual's
    norms of one model."""
    column = tl.arange(0, BLOCK_K)
    block = tl.arange(0, BLOCK)[None, :]
    line = row * columns + column
    part = line[:, None] * blocks + block
    inside = (column < length)[:, None] & (block < blocks)
    maxima = tl.load(partial_max + part, mask=inside, other=float("-inf"))
    sums = tl.load(partial_sum_exp + part, mask=inside, other=0.0)
    largest, sum_exp = merge_sum_exp(maxima, sums)
    count = tl.num_programs(0) * columns
    tl.store(norms + line, largest, mask=column < length)
    tl.store(norms + count + line, sum_exp, mask=column < length)
    return largest, sum_exp


@triton.jit
def draft_probabilities(
    row,
    token,  # int64 [BLOCK_K]
    length,
    processed,  # fp32 [R, 1 + K, V]
    draft_logits,  # fp32 [R, K, V]
    partial_max,  # fp32 [2, R * K, blocks]
    partial_sum_exp,  # fp32 [2, R * K, blocks]
    norms,  # out: fp32 [4, R * K]
    columns,  # K
    vocab,  # V
    blocks,  # of the vocabulary
    draft_row_stride,
    draft_column_stride,
    draft_token_stride,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """p and q fp32 [BLOCK_K] of a random row's first `length` tokens, 0 of the others; stores their columns' norms.

    One program per row.
    """
    column = tl.arange(0, BLOCK_K)
    count = tl.num_programs(0) * columns
    p_max, p_sum = _store_norms(row, length, partial_max, partial_sum_exp, norms, columns, blocks, BLOCK, BLOCK_K)
    q_max, q_sum = _store_norms(
        row,
        length,
        partial_max + count * blocks,
        partial_sum_exp + count * blocks,
        norms + 2 * count,
        columns,
        blocks,
        BLOCK,
        BLOCK_K,
    )
    # Both models' logits of the draft's tokens, and their probabilities
    inside = (column < length) & (token < vocab)
    x = tl.load(processed + (row * (columns + 1) + column) * vocab + token, mask=inside, other=float("-inf"))
    y = draft_logits + row * draft_row_stride + column * draft_column_stride + token * draft_token_stride
    y = tl.load(y, mask=inside, other=float("-inf"))
    p = tl.where(inside, tl.div_rn(tl.exp(x - p_max), p_sum), 0.0)
    q = tl.where(inside, tl.div_rn(tl.exp(y - q_max), q_sum), 0.0)
    return p, q


@triton.jit
def accept_uniform(seed, position):
    """fp32 in (0, 1), shaped as position: the accept uniform of a draft token there."""
    key = triton_key(seed, position, _ACCEPT)
    return triton_uniform(key, key * 0)
