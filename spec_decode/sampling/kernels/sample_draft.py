"""Sample a draft token per row, store it with its processed logits, and decide which rows continue."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling import noise
from spec_decode.sampling.kernels.vocab_blocks import merge_argmax, merge_sum_exp, store_max_sum_exp, vocab_block
from spec_decode.sampling.noise import triton_gumbel, triton_key

NO_TOKEN = -1
"""Draft token of a row that proposes nothing: padding, a request that could not advance, or one that has stopped."""

POSITION_AHEAD = 2  # a draft input at position p stands for token p + 1 and predicts token p + 2


class SampleDraft(NamedTuple):
    """The arguments of the op; DraftSampler documents the buffers, DraftSampler.__call__ the others."""

    logits: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    step: torch.Tensor
    draft_tokens: torch.Tensor
    draft_logits: torch.Tensor
    next_ids: torch.Tensor
    draft_lens: torch.Tensor
    num_tokens: torch.Tensor
    min_confidence: torch.Tensor
    continue_flag: torch.Tensor
    token_map: torch.Tensor | None
    hidden: torch.Tensor | None
    next_hidden: torch.Tensor | None

    def reference(self) -> None:
        (rows, vocab), columns = self.logits.shape, self.draft_tokens.shape[1]
        column, seq_lens, temperature = int(self.step), self.seq_lens[:rows], self.temperature[:rows]
        ids = torch.arange(vocab) if self.token_map is None else self.token_map
        is_random = temperature > 0
        processed = self.logits.float() / torch.where(is_random, temperature, 1.0)[:, None]
        keys = noise.key(self.seeds[:rows], self.positions[:rows] + POSITION_AHEAD, noise.DRAFT)
        perturbed = processed + noise.gumbel(keys[:, None], ids[None])
        chosen = torch.where(is_random[:, None], perturbed, processed).argmax(-1)
        lengths = self.draft_lens[:rows].clamp(max=self.num_tokens).clamp(max=columns)
        proposes = (seq_lens > 0) & (column < lengths)
        continues = proposes & (column + 1 < lengths)
        if self.min_confidence > 0:
            continues &= processed.softmax(-1).gather(1, chosen[:, None])[:, 0] >= self.min_confidence
        if column == 0:
            self.draft_tokens[:rows] = NO_TOKEN
        if column < columns:
            self.draft_logits[:rows, column, ids] = processed
            self.draft_tokens[:rows, column] = torch.where(proposes, ids[chosen], NO_TOKEN)
        self.next_ids[:rows] = torch.where(proposes, ids[chosen], 0)
        seq_lens *= continues
        self.continue_flag.fill_(continues.any())
        if self.hidden is not None and self.next_hidden is not None:
            self.next_hidden.copy_(self.hidden)

    def launch(self) -> None:
        (rows, vocab), columns, device = self.logits.shape, self.draft_tokens.shape[1], self.logits.device
        block = vocab_block(vocab)
        blocks = triton.cdiv(vocab, block)
        partial_score, partial_max, partial_sum_exp = torch.empty(3, rows, blocks, dtype=torch.float32, device=device)
        partial_index = torch.empty(rows, blocks, dtype=torch.int32, device=device)
        width, hidden_strides = 0, (0, 0)
        if self.hidden is not None and self.next_hidden is not None:
            width, hidden_strides = self.hidden.shape[1], (self.hidden.stride(0), self.next_hidden.stride(0))
        _block_argmax_kernel[(rows, blocks)](
            logits_ptr=self.logits,
            temperature_ptr=self.temperature,
            seeds_ptr=self.seeds,
            positions_ptr=self.positions,
            step_ptr=self.step,
            draft_logits_ptr=self.draft_logits,
            min_confidence_ptr=self.min_confidence,
            continue_flag_ptr=self.continue_flag,
            token_map_ptr=self.token_map,
            hidden_ptr=self.hidden,
            next_hidden_ptr=self.next_hidden,
            partial_score_ptr=partial_score,
            partial_max_ptr=partial_max,
            partial_sum_exp_ptr=partial_sum_exp,
            partial_index_ptr=partial_index,
            vocab_size=vocab,
            num_drafts=columns,
            stride_logits=self.logits.stride(0),
            stride_draft_row=self.draft_logits.stride(0),
            stride_draft_pos=self.draft_logits.stride(1),
            stride_hidden=hidden_strides[0],
            stride_next_hidden=hidden_strides[1],
            STREAM=noise.DRAFT,
            AHEAD=POSITION_AHEAD,
            HIDDEN_SIZE=width,
            BLOCK_H=triton.next_power_of_2(triton.cdiv(width, blocks)),
            BLOCK_V=block,
            # Four logits a thread: noise costs so much arithmetic that few threads, not memory, would set the pace.
            num_warps=max(1, min(8, block // 128)),
            **dependent_launch(device),
        )
        _store_token_kernel[(rows,)](
            logits_ptr=self.logits,
            temperature_ptr=self.temperature,
            seq_lens_ptr=self.seq_lens,
            step_ptr=self.step,
            draft_tokens_ptr=self.draft_tokens,
            next_ids_ptr=self.next_ids,
            draft_lens_ptr=self.draft_lens,
            num_tokens_ptr=self.num_tokens,
            min_confidence_ptr=self.min_confidence,
            continue_flag_ptr=self.continue_flag,
            token_map_ptr=self.token_map,
            partial_score_ptr=partial_score,
            partial_max_ptr=partial_max,
            partial_sum_exp_ptr=partial_sum_exp,
            partial_index_ptr=partial_index,
            vocab_size=vocab,
            num_drafts=columns,
            num_blocks=blocks,
            stride_logits=self.logits.stride(0),
            stride_draft_tokens=self.draft_tokens.stride(0),
            BLOCK_B=triton.next_power_of_2(blocks),
            BLOCK_K=triton.next_power_of_2(columns),
            num_warps=1,
            **dependent_launch(device),
        )


@triton.jit
def _block_argmax_kernel(
    logits_ptr,  # [rows, V of the draft]
    temperature_ptr,  # fp32 [R]
    seeds_ptr,  # int64 [R]
    positions_ptr,  # int64 [>= R]
    step_ptr,  # int64 [1]
    draft_logits_ptr,  # out: fp32 [R, K, V]
    min_confidence_ptr,  # fp32 [1]
    continue_flag_ptr,  # out: int32 [1]
    token_map_ptr,  # int64 [V of the draft], or None
    hidden_ptr,  # [rows, H], or None
    next_hidden_ptr,  # out: [rows, H], or None
    partial_score_ptr,  # out: fp32 [rows, blocks]
    partial_max_ptr,  # out: fp32 [rows, blocks]; not written without min_confidence, the next likewise
    partial_sum_exp_ptr,  # out: fp32 [rows, blocks]
    partial_index_ptr,  # out: int32 [rows, blocks]
    vocab_size,  # V of the draft
    num_drafts,  # K
    stride_logits,
    stride_draft_row,  # of draft_logits, as is the next
    stride_draft_pos,
    stride_hidden,
    stride_next_hidden,
    STREAM: tl.constexpr,  # of the noise
    AHEAD: tl.constexpr,  # from an input's position to that of the token it predicts
    HIDDEN_SIZE: tl.constexpr,  # H; 0 without hidden
    BLOCK_H: tl.constexpr,  # columns of H that a program copies
    BLOCK_V: tl.constexpr,  # logits of a program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """draft_logits = logits / temperature, and argmax of it + gumbel, over one block of the vocabulary.

    Grid [rows, blocks]; the rows are the first of the buffers' R.
    """
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    offs_v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = offs_v < vocab_size
    # 1. Load. Every load stands before the first store: after one that may alias it, it would wait until that is done.
    x = tl.load(logits_ptr + row * stride_logits + offs_v, mask=mask, other=float("-inf")).to(tl.float32)
    token = offs_v
    if token_map_ptr is not None:
        token = tl.load(token_map_ptr + offs_v, mask=mask, other=0)
    temperature = tl.load(temperature_ptr + row)
    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + row)
    k = tl.load(step_ptr)
    min_confidence = tl.load(min_confidence_ptr)
    # 2. Copy this program's share of the hidden states
    if HIDDEN_SIZE > 0:
        offs_h = block * BLOCK_H + tl.arange(0, BLOCK_H)
        state = tl.load(hidden_ptr + row * stride_hidden + offs_h, mask=offs_h < HIDDEN_SIZE)
        tl.store(next_hidden_ptr + row * stride_next_hidden + offs_h, state, mask=offs_h < HIDDEN_SIZE)
    # 3. Store the processed logits, which verification reads
    is_random = temperature > 0
    if is_random:
        x = tl.div_rn(x, temperature)
    draft_ptrs = draft_logits_ptr + row * stride_draft_row + k * stride_draft_pos + token
    tl.store(draft_ptrs, x, mask=mask & (k < num_drafts))
    part_offs = row * tl.num_programs(1) + block
    if (row == 0) & (block == 0):
        # The next kernel sets it where a row continues.
        tl.store(continue_flag_ptr, 0)
    if min_confidence > 0:
        store_max_sum_exp(x, partial_max_ptr + part_offs, partial_sum_exp_ptr + part_offs)
    # 4. The best of them, with noise in a random row
    if is_random:
        x = x + triton_gumbel(triton_key(seed, position + AHEAD, STREAM), token)
    max_score, argmax = tl.max(x, 0, return_indices=True)
    tl.store(partial_score_ptr + part_offs, max_score)
    tl.store(partial_index_ptr + part_offs, block * BLOCK_V + argmax)


@triton.jit
def _store_token_kernel(
    logits_ptr,  # [rows, V of the draft]
    temperature_ptr,  # fp32 [R]
    seq_lens_ptr,  # in and out: int32 [R]
    step_ptr,  # int64 [1]
    draft_tokens_ptr,  # out: int64 [R, K]
    next_ids_ptr,  # out: int64 [R]
    draft_lens_ptr,  # int32 [R]
    num_tokens_ptr,  # int32 [1]
    min_confidence_ptr,  # fp32 [1]
    continue_flag_ptr,  # out: int32 [1]
    token_map_ptr,  # int64 [V of the draft], or None
    partial_score_ptr,  # fp32 [rows, blocks]
    partial_max_ptr,  # fp32 [rows, blocks]
    partial_sum_exp_ptr,  # fp32 [rows, blocks]
    partial_index_ptr,  # int32 [rows, blocks]
    vocab_size,  # V of the draft
    num_drafts,  # K
    num_blocks,  # of the vocabulary
    stride_logits,
    stride_draft_tokens,
    BLOCK_B: tl.constexpr,  # blocks, rounded up to a power of two
    BLOCK_K: tl.constexpr,  # K, likewise
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """One program per row, of the first of the buffers' R: store its token, and decide whether it continues."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs_b = tl.arange(0, BLOCK_B)
    mask = offs_b < num_blocks
    part_offs = row * num_blocks + offs_b
    seq_len = tl.load(seq_lens_ptr + row)
    k = tl.load(step_ptr)
    draft_len = tl.minimum(tl.minimum(tl.load(draft_lens_ptr + row), tl.load(num_tokens_ptr)), num_drafts)
    min_confidence = tl.load(min_confidence_ptr)
    # 1. The token, the best of the blocks'
    _, draft_id = merge_argmax(partial_score_ptr + part_offs, partial_index_ptr + part_offs, mask)
    # Where every logit is NaN none was found; the token must lie in the vocabulary all the same.
    draft_id = tl.minimum(draft_id, vocab_size - 1).to(tl.int64)
    token = draft_id
    if token_map_ptr is not None:
        token = tl.load(token_map_ptr + draft_id)
    # 2. Whether the row proposes it, and then another
    proposes = (seq_len > 0) & (k < draft_len)
    continues = proposes & (k + 1 < draft_len)
    if min_confidence > 0:
        block_max = tl.load(partial_max_ptr + part_offs, mask=mask, other=float("-inf"))
        block_sum = tl.load(partial_sum_exp_ptr + part_offs, mask=mask, other=0.0)
        row_max, row_sum = merge_sum_exp(block_max, block_sum)
        temperature = tl.load(temperature_ptr + row)
        logit = tl.load(logits_ptr + row * stride_logits + draft_id).to(tl.float32)
        logit = tl.div_rn(logit, tl.where(temperature > 0, temperature, 1.0))
        continues = continues & (tl.div_rn(tl.exp(logit - row_max), row_sum) >= min_confidence)
    # 3. Store what it proposes, and whether it continues
    row_ptr = draft_tokens_ptr + row * stride_draft_tokens
    if k == 0:
        offs_k = tl.arange(0, BLOCK_K)
        tl.store(row_ptr + offs_k, -1, mask=(offs_k > 0) & (offs_k < num_drafts))
    tl.store(row_ptr + k, tl.where(proposes, token, -1), mask=k < num_drafts)
    tl.store(next_ids_ptr + row, tl.where(proposes, token, 0))
    tl.store(seq_lens_ptr + row, tl.where(continues, seq_len, 0))
    tl.store(continue_flag_ptr, 1, mask=continues)


sample_draft = define_op(
    "spec_decode::sample_draft",
    SampleDraft,
    mutates=("seq_lens", "draft_tokens", "draft_logits", "next_ids", "continue_flag", "next_hidden"),
)
