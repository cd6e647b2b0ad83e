"""Sample a draft token per row, store it with its processed logits, and decide which rows continue."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling.kernels.draft_argmax import launch_draft_argmax, sampled
from spec_decode.sampling.kernels.vocab_blocks import merge_argmax, merge_sum_exp

NO_TOKEN = -1
"""The draft token of a row that proposes nothing: padding, a request that could not advance or that has stopped."""


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
        column, seq_lens = int(self.step), self.seq_lens[:rows]
        ids = torch.arange(vocab) if self.token_map is None else self.token_map
        processed, chosen = sampled(self.logits, self.temperature[:rows], self.seeds[:rows], self.positions[:rows], ids)
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
        (rows, vocab), columns = self.logits.shape, self.draft_tokens.shape[1]
        partial = launch_draft_argmax(
            self.logits,
            self.temperature,
            self.seeds,
            self.positions,
            self.draft_logits,
            self.min_confidence,
            self.token_map,
            step=self.step,
            continue_flag=self.continue_flag,
            hidden=self.hidden,
            next_hidden=self.next_hidden,
        )
        blocks = partial["partial_index_ptr"].shape[1]
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
            **partial,
            vocab_size=vocab,
            num_drafts=columns,
            num_blocks=blocks,
            stride_logits=self.logits.stride(0),
            stride_draft_tokens=self.draft_tokens.stride(0),
            BLOCK_B=next_power_of_2(blocks),
            BLOCK_K=next_power_of_2(columns),
            num_warps=1,
            **dependent_launch(self.logits.device),
        )


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
    BLOCK_K: tl.constexpr,  # K, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Store a row's token, and decide whether it continues. One program per row; rows are the first of the R."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs_b = tl.arange(0, BLOCK_B)
    mask = offs_b < num_blocks
    part_offs = row * num_blocks + offs_b
    seq_len = tl.load(seq_lens_ptr + row)
    k = tl.load(step_ptr)
    draft_len = tl.minimum(tl.minimum(tl.load(draft_lens_ptr + row), tl.load(num_tokens_ptr)), num_drafts)
    min_confidence = tl.load(min_confidence_ptr)
    # 1. The token: the best of the blocks
    _, draft_id = merge_argmax(partial_score_ptr + part_offs, partial_index_ptr + part_offs, mask)
    # If every logit is NaN, no token was found; clamp to a valid one.
    draft_id = tl.minimum(draft_id, vocab_size - 1).to(tl.int64)
    token = draft_id
    if token_map_ptr is not None:
        token = tl.load(token_map_ptr + draft_id)
    # 2. Whether the row proposes it, and another one after it
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
    # 3. Store the token, and whether the row continues
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
