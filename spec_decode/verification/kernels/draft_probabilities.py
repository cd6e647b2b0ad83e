"""Device functions of the verify kernels: read a row's draft, its probabilities under both models, its uniforms."""

from __future__ import annotations

from builders.kernels.triton_runtime import tl, triton
from spec_decode.sampling.kernels.vocab_blocks import merge_sum_exp
from spec_decode.sampling.noise import ACCEPT, triton_key, triton_uniform

_ACCEPT = tl.constexpr(ACCEPT)


@triton.jit
def read_draft(
    row,
    draft_tokens_ptr,  # int64 [R, K]
    num_drafts,  # K
    BLOCK_K: tl.constexpr,
):
    """A row's draft int64 [BLOCK_K], -1 outside its K columns, and how many tokens it has before its end."""
    offs_k = tl.arange(0, BLOCK_K)
    draft_tokens = tl.load(draft_tokens_ptr + row * num_drafts + offs_k, mask=offs_k < num_drafts, other=-1)
    draft_len = tl.min(tl.where(draft_tokens < 0, offs_k, num_drafts), 0)
    return draft_tokens, draft_len


@triton.jit
def matches_argmax(
    row,
    draft_tokens,  # int64 [BLOCK_K]
    draft_len,
    partial_max_ptr,  # fp32 [R * K, blocks], of the target
    partial_argmax_ptr,  # int32 [R * K, blocks]
    num_drafts,  # K
    num_blocks,  # of the vocabulary
    BLOCK_B: tl.constexpr,  # blocks, rounded up to a power of two
    BLOCK_K: tl.constexpr,  # K, likewise
):
    """Of a greedy row: which of its first draft_len tokens are the target's argmax."""
    INT32_MAX: tl.constexpr = 2**31 - 1
    offs_k = tl.arange(0, BLOCK_K)
    offs_b = tl.arange(0, BLOCK_B)[None, :]
    part_offs = (row * num_drafts + offs_k[:, None]) * num_blocks + offs_b
    mask = (offs_k < draft_len)[:, None] & (offs_b < num_blocks)
    block_max = tl.load(partial_max_ptr + part_offs, mask=mask, other=float("-inf"))
    block_argmax = tl.load(partial_argmax_ptr + part_offs, mask=mask, other=INT32_MAX)
    max_logit = tl.max(block_max, 1)
    # Of equal logits the first wins.
    target_argmax = tl.min(tl.where(block_max == max_logit[:, None], block_argmax, INT32_MAX), 1)
    return (draft_tokens == target_argmax) & (offs_k < draft_len)


@triton.jit
def _merge_norms(
    row,
    draft_len,
    partial_max_ptr,  # fp32 [R * K, blocks], of one model
    partial_sum_exp_ptr,  # fp32 [R * K, blocks]
    norms_ptr,  # out: fp32 [2, R * K], the planes of that model
    num_rows,  # R
    num_drafts,  # K
    num_blocks,  # of the vocabulary
    BLOCK_B: tl.constexpr,  # blocks, rounded up to a power of two
    BLOCK_K: tl.constexpr,  # K, likewise
):
    """Returns the largest logit and the sum of exponentials, fp32 [BLOCK_K], of a random row's first draft_len columns;
    also stores them, as Residual's norms of one model."""
    offs_k = tl.arange(0, BLOCK_K)
    offs_b = tl.arange(0, BLOCK_B)[None, :]
    draft_row = row * num_drafts + offs_k
    part_offs = draft_row[:, None] * num_blocks + offs_b
    mask = (offs_k < draft_len)[:, None] & (offs_b < num_blocks)
    block_max = tl.load(partial_max_ptr + part_offs, mask=mask, other=float("-inf"))
    block_sum = tl.load(partial_sum_exp_ptr + part_offs, mask=mask, other=0.0)
    row_max, row_sum = merge_sum_exp(block_max, block_sum)
    tl.store(norms_ptr + draft_row, row_max, mask=offs_k < draft_len)
    tl.store(norms_ptr + num_rows * num_drafts + draft_row, row_sum, mask=offs_k < draft_len)
    return row_max, row_sum


@triton.jit
def probabilities_and_norms(
    row,
    draft_tokens,  # int64 [BLOCK_K]
    draft_len,
    target_logits_ptr,  # fp32 [R, 1 + K, V]
    draft_logits_ptr,  # fp32 [R, K, V]
    partial_max_ptr,  # fp32 [2, R * K, blocks]
    partial_sum_exp_ptr,  # fp32 [2, R * K, blocks]
    norms_ptr,  # out: fp32 [4, R * K], in the order of Residual's planes
    num_rows,  # R
    num_drafts,  # K
    vocab_size,  # V
    num_blocks,  # of the vocabulary
    stride_draft_row,
    stride_draft_pos,
    stride_draft_token,
    BLOCK_B: tl.constexpr,  # blocks, rounded up to a power of two
    BLOCK_K: tl.constexpr,  # K, likewise
):
    """exp(logit - max) / sum under both models, fp32 [BLOCK_K]: of a random row's draft_len tokens, 0 of the others.

    It also stores their columns' norms, max and sum, from which residual_weight computes later.
    """
    # 1. Each column's max and sum, for the target, then the draft
    offs_k = tl.arange(0, BLOCK_K)
    num_columns = num_rows * num_drafts
    target_max, target_sum = _merge_norms(
        row,
        draft_len,
        partial_max_ptr,
        partial_sum_exp_ptr,
        norms_ptr,
        num_rows,
        num_drafts,
        num_blocks,
        BLOCK_B,
        BLOCK_K,
    )
    draft_max, draft_sum = _merge_norms(
        row,
        draft_len,
        partial_max_ptr + num_columns * num_blocks,
        partial_sum_exp_ptr + num_columns * num_blocks,
        norms_ptr + 2 * num_columns,
        num_rows,
        num_drafts,
        num_blocks,
        BLOCK_B,
        BLOCK_K,
    )
    # 2. Both models' logits of the draft tokens, and their probabilities; a token beyond the vocabulary has 0
    mask = (offs_k < draft_len) & (draft_tokens < vocab_size)
    target_ptrs = target_logits_ptr + (row * (num_drafts + 1) + offs_k) * vocab_size + draft_tokens
    target_logits = tl.load(target_ptrs, mask=mask, other=float("-inf"))
    draft_ptrs = draft_logits_ptr + row * stride_draft_row + offs_k.to(tl.int64) * stride_draft_pos
    draft_logits = tl.load(draft_ptrs + draft_tokens * stride_draft_token, mask=mask, other=float("-inf"))
    target_probs = tl.where(mask, tl.div_rn(tl.exp(target_logits - target_max), target_sum), 0.0)
    draft_probs = tl.where(mask, tl.div_rn(tl.exp(draft_logits - draft_max), draft_sum), 0.0)
    return target_probs, draft_probs


@triton.jit
def accept_uniform(seed, position):
    """fp32 in (0, 1), shaped as position: the accept uniform of a draft token there."""
    key = triton_key(seed, position, _ACCEPT)
    return triton_uniform(key, key * 0)  # the noise of token 0: one number a position
