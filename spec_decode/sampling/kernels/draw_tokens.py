"""Draw the target's token after each row's accepted draft: the argmax, or a sample with noise by seed and position."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling import noise
from spec_decode.sampling.kernels.vocab_blocks import merge_argmax, nan_as_inf, vocab_block
from spec_decode.sampling.noise import triton_gumbel, triton_key

NO_TOKEN = -1
"""Drawn from logits that define no distribution: a NaN or +inf among them, or nothing but -inf."""


class Residual(NamedTuple):
    """The distribution to draw from after verification: max(w p - q, 0) where a token was rejected, else p. R rows.

    - accepted      int64 [R]        accepted draft tokens; the token after them is drawn, from this column's logits
    - weight        fp32 [R]         w; 0 where nothing was rejected, to draw from p
    - norms         fp32 [4, R * K]  planes with a number per draft column: p's largest logit, p's sum of
                                     exp(logit - largest), then the same two of q; read only where weight > 0
    - draft_logits  fp32 [R, K, V]   the logits of q

    For greedy rows weight and norms are not read, and can be uninitialised.
    """

    accepted: torch.Tensor
    weight: torch.Tensor
    norms: torch.Tensor
    draft_logits: torch.Tensor

    @classmethod
    def allocate(cls, draft_logits: torch.Tensor) -> Residual:
        """Allocate uninitialised memory for a kernel to write; draft_logits fp32 [R, K, V]."""
        (rows, columns, _), device = draft_logits.shape, draft_logits.device
        accepted = torch.empty(rows, dtype=torch.int64, device=device)
        weight = torch.empty(rows, dtype=torch.float32, device=device)
        return cls(accepted, weight, torch.empty(4, rows * columns, dtype=torch.float32, device=device), draft_logits)


def drawn_tokens(
    processed: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Torch reference: the argmax of processed logits fp32 [..., V] where temperature is 0, else a draw from their
    softmax; the first of equal logits wins; NO_TOKEN where they define no distribution. temperature fp32, seeds and
    positions int64 broadcast to [...]."""
    tokens = processed.argmax(-1)
    if bool((temperature > 0).any()):  # noise takes longer than everything else
        keys = noise.key(seeds, positions, noise.TARGET)
        perturbed = processed + noise.gumbel(keys[..., None], torch.arange(processed.shape[-1]))
        tokens = torch.where(temperature > 0, perturbed.argmax(-1), tokens)
    return tokens.where(processed.amax(-1).isfinite(), NO_TOKEN)


def launch_draw(
    processed: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    residual: Residual,
) -> torch.Tensor:
    """Launch the kernels; return int64 [R], a token per row of processed fp32 [R, 1 + K, V], drawn from column
    `accepted` at positions + accepted."""
    (rows, group, vocab), device = processed.shape, processed.device
    block = vocab_block(vocab)
    blocks = cdiv(vocab, block)
    accepted, weight, norms, draft_logits = residual
    strides = draft_logits.stride()
    # Plane 0 is for draws from p, plane 1 for draws from the residual.
    partial_score = torch.empty(2, rows, blocks, dtype=torch.float32, device=device)
    partial_index = torch.empty(2, rows, blocks, dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    _block_draw_kernel[(rows, blocks)](
        target_logits_ptr=processed,
        temperature_ptr=temperature,
        seeds_ptr=seeds,
        positions_ptr=positions,
        num_accepted_ptr=accepted,
        weights_ptr=weight,
        norms_ptr=norms,
        draft_logits_ptr=draft_logits,
        partial_score_ptr=partial_score,
        partial_index_ptr=partial_index,
        group_size=group,
        vocab_size=vocab,
        stride_draft_row=strides[0],
        stride_draft_pos=strides[1],
        stride_draft_token=strides[2],
        STREAM=noise.TARGET,
        BLOCK_V=block,
        # Few logits per thread, as in the draft's sampling: noise is compute-bound.
        num_warps=max(1, min(8, block // 128)),
        **dependent_launch(device),
    )
    store_draw_kernel[(rows,)](
        partial_score_ptr=partial_score,
        partial_index_ptr=partial_index,
        tokens_ptr=tokens,
        num_blocks=blocks,
        RESIDUAL=True,
        BLOCK_B=next_power_of_2(blocks),
        num_warps=1,
        **dependent_launch(device),
    )
    return tokens


@triton.jit
def _block_draw_kernel(
    target_logits_ptr,  # fp32 [R, G, V]
    temperature_ptr,  # fp32 [R]
    seeds_ptr,  # int64 [R]
    positions_ptr,  # int64 [R]
    num_accepted_ptr,  # int64 [R]
    weights_ptr,  # fp32 [R]
    norms_ptr,  # fp32 [4, R * (G - 1)]
    draft_logits_ptr,  # fp32 [R, G - 1, V]
    partial_score_ptr,  # out: fp32 [2, R, blocks], of p and of the residual
    partial_index_ptr,  # out: int32 [2, R, blocks]
    group_size,  # G
    vocab_size,  # V
    stride_draft_row,
    stride_draft_pos,
    stride_draft_token,
    STREAM: tl.constexpr,  # noise stream
    BLOCK_V: tl.constexpr,  # logits per program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """argmax of target_logits + gumbel, and of log(residual) + gumbel, over one block of the vocabulary.

    Gumbel-max sampling: either argmax is a draw from its distribution. Grid [R, blocks].
    """
    await_previous(PDL)
    # 1. The column to draw from, and its position
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    num_rows, num_blocks = tl.num_programs(0), tl.num_programs(1)
    offs_v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = offs_v < vocab_size
    temperature = tl.load(temperature_ptr + row)
    seed = tl.load(seeds_ptr + row)
    k = tl.load(num_accepted_ptr + row)
    position = tl.load(positions_ptr + row) + k
    logits_row = row * group_size + k
    w = 0.0
    if temperature > 0:
        w = tl.load(weights_ptr + row)
    # 2. The best target token
    target_logits = tl.load(target_logits_ptr + logits_row * vocab_size + offs_v, mask=mask, other=float("-inf"))
    target_logits = nan_as_inf(target_logits)
    gumbel = tl.zeros((BLOCK_V,), tl.float32)
    if temperature > 0:
        gumbel = triton_gumbel(triton_key(seed, position, STREAM), offs_v)
    max_score, argmax = tl.max(target_logits + gumbel, 0, return_indices=True)
    part_offs = row * num_blocks + block
    # 3. The best residual token, with the same noise
    residual_score = tl.full((BLOCK_V,), float("-inf"), tl.float32)
    if w > 0:
        draft_ptrs = draft_logits_ptr + row * stride_draft_row + k * stride_draft_pos
        draft_ptrs += offs_v.to(tl.int64) * stride_draft_token
        draft_logits = tl.load(draft_ptrs, mask=mask, other=float("-inf"))
        draft_row, num_draft_rows = row * (group_size - 1) + k, num_rows * (group_size - 1)
        residual = residual_weight(target_logits, draft_logits, w, norms_ptr, draft_row, num_draft_rows)
        residual_score = tl.log(residual) + gumbel
    residual_max, residual_argmax = tl.max(residual_score, 0, return_indices=True)
    tl.store(partial_score_ptr + num_rows * num_blocks + part_offs, residual_max)
    tl.store(partial_index_ptr + num_rows * num_blocks + part_offs, block * BLOCK_V + residual_argmax)
    tl.store(partial_score_ptr + part_offs, max_score)
    tl.store(partial_index_ptr + part_offs, block * BLOCK_V + argmax)


@triton.jit
def residual_weight(
    target_logits,  # fp32 [BLOCK_V]
    draft_logits,  # fp32 [BLOCK_V]
    w,
    norms_ptr,  # fp32 [4, R * K]
    draft_row,
    num_draft_rows,  # R * K
):
    """Return max(w target_probs - draft_probs, 0), with both softmaxes normalised by Residual.norms of draft_row."""
    target_scale = tl.div_rn(w, tl.load(norms_ptr + num_draft_rows + draft_row))
    draft_scale = tl.div_rn(1.0, tl.load(norms_ptr + 3 * num_draft_rows + draft_row))
    target_probs = tl.exp(target_logits - tl.load(norms_ptr + draft_row)) * target_scale
    draft_probs = tl.exp(draft_logits - tl.load(norms_ptr + 2 * num_draft_rows + draft_row)) * draft_scale
    # A NaN draft has no token accepted, so q takes nothing from p.
    draft_probs = tl.where(draft_probs == draft_probs, draft_probs, 0.0)
    # The maximum turns NaN into 0: a NaN residual is empty, and the token is drawn from p.
    return tl.maximum(target_probs - draft_probs, 0.0)


@triton.jit
def store_draw_kernel(
    partial_score_ptr,  # fp32 [R, blocks]; with RESIDUAL [2, R, blocks], of p and of the residual
    partial_index_ptr,  # int32, same shape
    tokens_ptr,  # out: int64 [R]
    num_blocks,  # of the vocabulary
    RESIDUAL: tl.constexpr,
    BLOCK_B: tl.constexpr,  # blocks, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Merge the blocks of a row and store its token, from the residual if that is not empty; NO_TOKEN if the best score
    of p is not finite, see nan_as_inf. One program per row."""
    NO_TOKEN: tl.constexpr = -1
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs_b = tl.arange(0, BLOCK_B)
    part_offs = row * num_blocks + offs_b
    max_score, token = merge_argmax(partial_score_ptr + part_offs, partial_index_ptr + part_offs, offs_b < num_blocks)
    if RESIDUAL:
        part_offs += tl.num_programs(0) * num_blocks
        residual_max, residual_token = merge_argmax(
            partial_score_ptr + part_offs, partial_index_ptr + part_offs, offs_b < num_blocks
        )
        # The residual is empty if nothing was rejected, or if p and q differ by no more than rounding.
        token = tl.where(residual_max > float("-inf"), residual_token, token)
    tl.store(tokens_ptr + row, tl.where(tl.abs(max_score) < float("inf"), token, NO_TOKEN).to(tl.int64))
