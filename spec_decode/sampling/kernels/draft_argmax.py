"""The first of two kernels that sample draft tokens: process logits, find the best token of each vocabulary block."""

from __future__ import annotations

import torch

from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling import noise
from spec_decode.sampling.kernels.vocab_blocks import store_max_sum_exp, vocab_block
from spec_decode.sampling.noise import triton_gumbel, triton_key

POSITION_AHEAD = 2  # a draft input at position p stands for token p + 1 and predicts token p + 2


def sampled(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch reference: return processed logits fp32 [L, V of the draft] and the drawn index of each line, int64 [L].

    temperature fp32 [L]; seeds int64 [L]; positions int64 [L], of the inputs; ids int64 [V of the draft], target ids.
    """
    is_random = temperature > 0
    processed = logits.float() / torch.where(is_random, temperature, 1.0)[:, None]
    keys = noise.key(seeds, positions + POSITION_AHEAD, noise.DRAFT)
    perturbed = processed + noise.gumbel(keys[:, None], ids[None])
    return processed, torch.where(is_random[:, None], perturbed, processed).argmax(-1)


def launch_draft_argmax(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    draft_logits: torch.Tensor,
    min_confidence: torch.Tensor,
    token_map: torch.Tensor | None,
    *,
    step: torch.Tensor | None = None,
    continue_flag: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
    next_hidden: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Launch the kernel for lines of logits [L, V of the draft]. With `step`, a line is column `step` of a row, and
    continue_flag is cleared; without, line r * K + k is column k of row r. DraftSampler documents the tensors.

    Returns the per-block arguments of the second kernel, [L, blocks].
    """
    (lines, vocab), device = logits.shape, logits.device
    block = vocab_block(vocab)
    blocks = cdiv(vocab, block)
    partial_score, partial_max, partial_sum_exp = torch.empty(3, lines, blocks, dtype=torch.float32, device=device)
    partial_index = torch.empty(lines, blocks, dtype=torch.int32, device=device)
    width, hidden_strides = 0, (0, 0)
    if hidden is not None and next_hidden is not None:
        width, hidden_strides = hidden.shape[1], (hidden.stride(0), next_hidden.stride(0))
    partial = {
        "partial_score_ptr": partial_score,
        "partial_max_ptr": partial_max,
        "partial_sum_exp_ptr": partial_sum_exp,
        "partial_index_ptr": partial_index,
    }
    _draft_argmax_kernel[(lines, blocks)](
        logits_ptr=logits,
        temperature_ptr=temperature,
        seeds_ptr=seeds,
        positions_ptr=positions,
        step_ptr=step,
        draft_logits_ptr=draft_logits,
        min_confidence_ptr=min_confidence,
        continue_flag_ptr=continue_flag,
        token_map_ptr=token_map,
        hidden_ptr=hidden,
        next_hidden_ptr=next_hidden,
        **partial,
        vocab_size=vocab,
        num_drafts=draft_logits.shape[1],
        stride_logits=logits.stride(0),
        stride_draft_row=draft_logits.stride(0),
        stride_draft_pos=draft_logits.stride(1),
        stride_hidden=hidden_strides[0],
        stride_next_hidden=hidden_strides[1],
        STREAM=noise.DRAFT,
        AHEAD=POSITION_AHEAD,
        HIDDEN_SIZE=width,
        BLOCK_H=next_power_of_2(cdiv(width, blocks)),
        BLOCK_V=block,
        # Four logits per thread: noise needs so much arithmetic that fewer threads would make it compute-bound.
        num_warps=max(1, min(8, block // 128)),
        **dependent_launch(device),
    )
    return partial


@triton.jit
def _draft_argmax_kernel(
    logits_ptr,  # [L, V of the draft]
    temperature_ptr,  # fp32 [R]
    seeds_ptr,  # int64 [R]
    positions_ptr,  # int64 [>= L]
    step_ptr,  # int64 [1], the column of all lines; None: line r * K + k is column k of row r
    draft_logits_ptr,  # out: fp32 [R, K, V]
    min_confidence_ptr,  # fp32 [1]
    continue_flag_ptr,  # out: int32 [1], or None without step_ptr
    token_map_ptr,  # int64 [V of the draft], or None
    hidden_ptr,  # [L, H], or None
    next_hidden_ptr,  # out: [L, H], or None
    partial_score_ptr,  # out: fp32 [L, blocks]
    partial_max_ptr,  # out: fp32 [L, blocks]; not written without min_confidence, like the next
    partial_sum_exp_ptr,  # out: fp32 [L, blocks]
    partial_index_ptr,  # out: int32 [L, blocks]
    vocab_size,  # V of the draft
    num_drafts,  # K
    stride_logits,
    stride_draft_row,  # of draft_logits, like the next
    stride_draft_pos,
    stride_hidden,
    stride_next_hidden,
    STREAM: tl.constexpr,  # noise stream
    AHEAD: tl.constexpr,  # position of the predicted token minus that of the input
    HIDDEN_SIZE: tl.constexpr,  # H; 0 without hidden
    BLOCK_H: tl.constexpr,  # columns of H per program
    BLOCK_V: tl.constexpr,  # logits per program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """draft_logits = logits / temperature, and argmax of draft_logits + gumbel, over one vocabulary block of a line.

    Grid [L, blocks]; rows are the first of the R.
    """
    await_previous(PDL)
    line = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = line if step_ptr is not None else line // num_drafts
    offs_v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = offs_v < vocab_size
    # 1. Load. All loads precede the first store: a load after a store that can alias it would wait for the store.
    x = tl.load(logits_ptr + line * stride_logits + offs_v, mask=mask, other=float("-inf")).to(tl.float32)
    token = offs_v
    if token_map_ptr is not None:
        token = tl.load(token_map_ptr + offs_v, mask=mask, other=0)
    temperature = tl.load(temperature_ptr + row)
    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + line)
    k = tl.load(step_ptr) if step_ptr is not None else line % num_drafts
    min_confidence = tl.load(min_confidence_ptr)
    # 2. Copy this program's share of the hidden states
    if HIDDEN_SIZE > 0:
        offs_h = block * BLOCK_H + tl.arange(0, BLOCK_H)
        state = tl.load(hidden_ptr + line * stride_hidden + offs_h, mask=offs_h < HIDDEN_SIZE)
        tl.store(next_hidden_ptr + line * stride_next_hidden + offs_h, state, mask=offs_h < HIDDEN_SIZE)
    # 3. Store the processed logits, which verification reads
    is_random = temperature > 0
    if is_random:
        x = tl.div_rn(x, temperature)
    draft_ptrs = draft_logits_ptr + row * stride_draft_row + k * stride_draft_pos + token
    # A step can be past the last column.
    tl.store(draft_ptrs, x, mask=mask & (k < num_drafts) if step_ptr is not None else mask)
    part_offs = line * tl.num_programs(1) + block
    if continue_flag_ptr is not None:
        # The next kernel sets it if a row continues.
        tl.store(continue_flag_ptr, 0, mask=(line == 0) & (block == 0))
    if min_confidence > 0:
        store_max_sum_exp(x, partial_max_ptr + part_offs, partial_sum_exp_ptr + part_offs)
    # 4. The best of them, with noise unless greedy
    if is_random:
        x = x + triton_gumbel(triton_key(seed, position + AHEAD, STREAM), token)
    max_score, argmax = tl.max(x, 0, return_indices=True)
    tl.store(partial_score_ptr + part_offs, max_score)
    tl.store(partial_index_ptr + part_offs, block * BLOCK_V + argmax)
