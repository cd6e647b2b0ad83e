"""The stage of every lossless verifier that evaluates a row's draft: the probabilities of its tokens, and their norms.

Legend: R rows, K draft tokens per row, V tokens of the vocabulary.
"""

from __future__ import annotations

import torch

from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling.kernels.draw_tokens import Residual
from spec_decode.sampling.kernels.vocab_blocks import merge_sum_exp
from spec_decode.sampling.noise import ACCEPT, triton_key, triton_uniform
from spec_decode.verification.kernels.partial_max import PartialMax
from spec_decode.verification.kernels.verify_arguments import VerifyArguments

_ACCEPT = tl.constexpr(ACCEPT)
_TINY = torch.finfo(torch.float32).tiny


def launch_accept_draft(arguments: VerifyArguments, weights: torch.Tensor | None) -> tuple[Residual, dict[str, int]]:
    """Accept the drafts token by token or, with weights fp32 [R, K], write the prefix weights of block verification.

    Returns the residual, with norms written, and counts and weights as the kernel documents; and the launch options of
    a following kernel with one program per row.
    """
    processed, draft_tokens, draft_logits, temperature, _, accept_seeds, draft_positions = arguments
    rows, columns, vocab = draft_logits.shape
    partial, residual = PartialMax.launch(arguments), Residual.allocate(draft_logits)
    options = partial.launch_options(columns)
    _accept_draft_kernel[(rows,)](
        target_logits_ptr=processed,
        draft_tokens_ptr=draft_tokens,
        draft_logits_ptr=draft_logits,
        temperature_ptr=temperature,
        accept_seeds_ptr=accept_seeds,
        draft_positions_ptr=draft_positions,
        partial_max_ptr=partial.largest,
        partial_sum_exp_ptr=partial.sum_exp,
        partial_argmax_ptr=partial.argmax,
        weights_ptr=weights,
        num_accepted_ptr=residual.accepted,
        weight_ptr=residual.weight,
        norms_ptr=residual.norms,
        num_rows=rows,
        num_drafts=columns,
        vocab_size=vocab,
        num_blocks=partial.argmax.shape[1],
        stride_draft_row=draft_logits.stride(0),
        stride_draft_pos=draft_logits.stride(1),
        stride_draft_token=draft_logits.stride(2),
        TINY=_TINY,
        **options,
        **dependent_launch(processed.device),
    )
    return residual, options


@triton.jit
def _accept_draft_kernel(
    target_logits_ptr,  # fp32 [R, 1 + K, V]
    draft_tokens_ptr,  # int64 [R, K]
    draft_logits_ptr,  # fp32 [R, K, V]
    temperature_ptr,  # fp32 [R]
    accept_seeds_ptr,  # int64 [R], for the accept uniforms
    draft_positions_ptr,  # int64 [R], absolute position of draft token 0
    partial_max_ptr,  # fp32 [2, R * K, blocks], of the target and of the draft
    partial_sum_exp_ptr,  # fp32 [2, R * K, blocks], likewise
    partial_argmax_ptr,  # int32 [R * K, blocks], of the target in greedy rows
    weights_ptr,  # out: fp32 [R, K], of random rows; or None
    num_accepted_ptr,  # out: int64 [R]; with weights_ptr only greedy rows
    weight_ptr,  # out: fp32 [R], w of the residual max(w p - q, 0), 0 to draw from p; not written with weights_ptr
    norms_ptr,  # out: fp32 [4, R * K], in the order of Residual's planes
    num_rows,  # R
    num_drafts,  # K
    vocab_size,  # V
    num_blocks,  # of the vocabulary
    stride_draft_row,
    stride_draft_pos,
    stride_draft_token,
    TINY: tl.constexpr,  # the smallest normal fp32
    BLOCK_B: tl.constexpr,  # blocks, rounded up to a power of two
    BLOCK_K: tl.constexpr,  # K, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Accept draft token k if uniform * draft_probs[k] < target_probs[k], up to the first that fails; greedy rows
    accept argmax tokens. One program per row.

    Speculative sampling: Leviathan et al., 2023 (arXiv:2211.17192, algorithm 1). With weights_ptr, random rows accept
    nothing yet and store w(k) = min(1, w(k - 1) target_probs[k] / draft_probs[k]), w(0) = 1, up to the draft's end
    (block verification: Sun et al., 2024, arXiv:2403.10444, algorithm 2).
    """
    INT32_MAX: tl.constexpr = 2**31 - 1
    await_previous(PDL)
    # 1. Load the row's draft tokens [BLOCK_K]; draft_len of them precede the first negative one
    row = tl.program_id(0).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    draft_tokens, draft_len = read_draft(row, draft_tokens_ptr, num_drafts, BLOCK_K)
    if tl.load(temperature_ptr + row) > 0:
        # 2. A random row: the norms of its columns, for the target, then the draft, and both models' probabilities of
        # the draft tokens; 0 for a token past the vocabulary
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
        mask = (offs_k < draft_len) & (draft_tokens < vocab_size)
        target_ptrs = target_logits_ptr + (row * (num_drafts + 1) + offs_k) * vocab_size + draft_tokens
        target_logits = tl.load(target_ptrs, mask=mask, other=float("-inf"))
        draft_ptrs = draft_logits_ptr + row * stride_draft_row + offs_k.to(tl.int64) * stride_draft_pos
        draft_logits = tl.load(draft_ptrs + draft_tokens * stride_draft_token, mask=mask, other=float("-inf"))
        target_probs = tl.where(mask, tl.div_rn(tl.exp(target_logits - target_max), target_sum), 0.0)
        draft_probs = tl.where(mask, tl.div_rn(tl.exp(draft_logits - draft_max), draft_sum), 0.0)
        if weights_ptr is None:
            uniform = accept_uniform(tl.load(accept_seeds_ptr + row), tl.load(draft_positions_ptr + row) + offs_k)
            # Strictly less: past the draft's end both are 0, and a product that underflows to 0 must not accept a token
            # that the target cannot produce.
            accept = uniform * draft_probs < target_probs
        else:
            # One token after another. NaN must stay NaN, so that no prefix with it passes: without propagate_nan,
            # minimum and maximum return their other argument.
            ratio = tl.div_rn(target_probs, tl.maximum(draft_probs, TINY, propagate_nan=tl.PropagateNan.ALL))
            w = 1.0
            weights = tl.zeros((BLOCK_K,), tl.float32)
            for i in range(0, draft_len):
                product = w * tl.sum(tl.where(offs_k == i, ratio, 0.0), 0)
                w = tl.minimum(1.0, product, propagate_nan=tl.PropagateNan.ALL)
                weights = tl.where(offs_k == i, w, weights)
            tl.store(weights_ptr + row * num_drafts + offs_k, weights, mask=offs_k < draft_len)
    else:
        # A greedy row: which of its tokens are the target's argmax. The first of equal logits wins. Logits that define
        # no distribution have no argmax; in a random row their probabilities are NaN, which fail every comparison.
        offs_b = tl.arange(0, BLOCK_B)[None, :]
        part_offs = (row * num_drafts + offs_k[:, None]) * num_blocks + offs_b
        mask_b = (offs_k < draft_len)[:, None] & (offs_b < num_blocks)
        block_max = tl.load(partial_max_ptr + part_offs, mask=mask_b, other=float("-inf"))
        block_argmax = tl.load(partial_argmax_ptr + part_offs, mask=mask_b, other=INT32_MAX)
        max_logit = tl.max(block_max, 1)
        target_argmax = tl.min(tl.where(block_max == max_logit[:, None], block_argmax, INT32_MAX), 1)
        accept = (draft_tokens == target_argmax) & (tl.abs(max_logit) < float("inf")) & (offs_k < draft_len)
        if weights_ptr is not None:
            tl.store(num_accepted_ptr + row, _count_accepted(accept, offs_k, num_drafts))
    if weights_ptr is None:
        # 3. launch_draw replaces the first rejected token by a draw from max(p - q, 0), with weight 1
        num_accepted = _count_accepted(accept, offs_k, num_drafts)
        tl.store(num_accepted_ptr + row, num_accepted)
        tl.store(weight_ptr + row, tl.where(num_accepted < draft_len, 1.0, 0.0))


@triton.jit
def _count_accepted(accept, offs_k, num_drafts):
    """Count the tokens before the first rejected one. If there is none, the result is num_drafts: columns past K accept
    nothing, and their index is at least num_drafts."""
    return tl.min(tl.where(accept, num_drafts, offs_k), 0).to(tl.int64)


@triton.jit
def read_draft(
    row,
    draft_tokens_ptr,  # int64 [R, K]
    num_drafts,  # K
    BLOCK_K: tl.constexpr,
):
    """Load a row's draft int64 [BLOCK_K], -1 past its K columns; return it and its number of tokens."""
    offs_k = tl.arange(0, BLOCK_K)
    draft_tokens = tl.load(draft_tokens_ptr + row * num_drafts + offs_k, mask=offs_k < num_drafts, other=-1)
    draft_len = tl.min(tl.where(draft_tokens < 0, offs_k, num_drafts), 0)
    return draft_tokens, draft_len


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
    BLOCK_K: tl.constexpr,  # K, rounded up to a power of two
):
    """Return the largest logit and the sum of exponentials, fp32 [BLOCK_K], of a random row's first draft_len columns,
    and store them as one model's planes of Residual.norms."""
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
def accept_uniform(seed, position):
    """Return the accept uniform of a draft token at `position`: fp32 in (0, 1), in the shape of position."""
    key = triton_key(seed, position, _ACCEPT)
    return triton_uniform(key, key * 0)  # the noise of token 0: one number per position
