"""Sample all draft tokens of a block at once; store their processed logits, and the tokens up to where a row stops."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling.kernels.draft_argmax import launch_draft_argmax, sampled
from spec_decode.sampling.kernels.sample_draft import NO_TOKEN
from spec_decode.sampling.kernels.vocab_blocks import merge_sum_exp


class SampleBlock(NamedTuple):
    """The arguments of the op; DraftSampler documents the buffers, DraftSampler.sample_block the others.

    logits [R * K, V of the draft] and positions int64 [R * K] hold column k of row r at r * K + k. seq_lens is only
    read.
    """

    logits: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    draft_tokens: torch.Tensor
    draft_logits: torch.Tensor
    draft_lens: torch.Tensor
    num_tokens: torch.Tensor
    min_confidence: torch.Tensor
    token_map: torch.Tensor | None

    def reference(self) -> None:
        columns, vocab = self.draft_tokens.shape[1], self.logits.shape[1]
        rows = len(self.logits) // columns
        ids = torch.arange(vocab) if self.token_map is None else self.token_map
        temperature, seeds = (each[:rows].repeat_interleave(columns) for each in (self.temperature, self.seeds))
        processed, chosen = sampled(self.logits, temperature, seeds, self.positions, ids)
        lengths = self.draft_lens[:rows].clamp(max=self.num_tokens).clamp(max=columns)
        proposes = (self.seq_lens[:rows, None] > 0) & (torch.arange(columns) < lengths[:, None])
        if self.min_confidence > 0:
            sure = processed.softmax(-1).gather(1, chosen[:, None])[:, 0] >= self.min_confidence
            proposes[:, 1:] &= sure.view(rows, columns)[:, :-1].cumprod(1).bool()
        self.draft_logits[:rows, :, ids] = processed.view(rows, columns, vocab)
        self.draft_tokens[:rows] = torch.where(proposes, ids[chosen].view(rows, columns), NO_TOKEN)

    def launch(self) -> None:
        (lines, vocab), columns = self.logits.shape, self.draft_tokens.shape[1]
        partial = launch_draft_argmax(
            self.logits,
            self.temperature,
            self.seeds,
            self.positions,
            self.draft_logits,
            self.min_confidence,
            self.token_map,
        )
        blocks = partial["partial_index_ptr"].shape[1]
        parts = next_power_of_2(columns) * next_power_of_2(blocks)
        _store_block_kernel[(lines // columns,)](
            logits_ptr=self.logits,
            temperature_ptr=self.temperature,
            seq_lens_ptr=self.seq_lens,
            draft_tokens_ptr=self.draft_tokens,
            draft_lens_ptr=self.draft_lens,
            num_tokens_ptr=self.num_tokens,
            min_confidence_ptr=self.min_confidence,
            token_map_ptr=self.token_map,
            **partial,
            vocab_size=vocab,
            num_drafts=columns,
            num_blocks=blocks,
            stride_logits=self.logits.stride(0),
            stride_draft_tokens=self.draft_tokens.stride(0),
            BLOCK_B=next_power_of_2(blocks),
            BLOCK_K=next_power_of_2(columns),
            num_warps=max(1, min(8, parts // 256)),
            **dependent_launch(self.logits.device),
        )


@triton.jit
def _store_block_kernel(
    logits_ptr,  # [rows * K, V of the draft]
    temperature_ptr,  # fp32 [R]
    seq_lens_ptr,  # int32 [R]
    draft_tokens_ptr,  # out: int64 [R, K]
    draft_lens_ptr,  # int32 [R]
    num_tokens_ptr,  # int32 [1]
    min_confidence_ptr,  # fp32 [1]
    token_map_ptr,  # int64 [V of the draft], or None
    partial_score_ptr,  # fp32 [rows * K, blocks]
    partial_max_ptr,  # fp32 [rows * K, blocks]
    partial_sum_exp_ptr,  # fp32 [rows * K, blocks]
    partial_index_ptr,  # int32 [rows * K, blocks]
    vocab_size,  # V of the draft
    num_drafts,  # K
    num_blocks,  # of the vocabulary
    stride_logits,
    stride_draft_tokens,
    BLOCK_B: tl.constexpr,  # blocks, rounded up to a power of two
    BLOCK_K: tl.constexpr,  # K, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Store a row's tokens up to where it stops, -1 after that. One program per row; rows are the first of the R."""
    INT32_MAX: tl.constexpr = 2**31 - 1
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    offs_b = tl.arange(0, BLOCK_B)[None, :]
    draft_row = row * num_drafts + offs_k
    part_offs = draft_row[:, None] * num_blocks + offs_b
    mask = (offs_k < num_drafts)[:, None] & (offs_b < num_blocks)
    # 1. The token of each column: the best of its blocks
    score = tl.load(partial_score_ptr + part_offs, mask=mask, other=float("-inf"))
    index = tl.load(partial_index_ptr + part_offs, mask=mask, other=INT32_MAX)
    max_score = tl.max(score, 1)
    draft_ids = tl.min(tl.where(score == max_score[:, None], index, INT32_MAX), 1)
    # If every logit is NaN, no token was found; clamp to a valid one.
    draft_ids = tl.minimum(draft_ids, vocab_size - 1).to(tl.int64)
    draft_tokens = draft_ids
    if token_map_ptr is not None:
        draft_tokens = tl.load(token_map_ptr + draft_ids)
    # 2. The number of tokens that the row proposes; store them
    draft_len = tl.minimum(tl.minimum(tl.load(draft_lens_ptr + row), tl.load(num_tokens_ptr)), num_drafts)
    draft_len = tl.where(tl.load(seq_lens_ptr + row) > 0, draft_len, 0)
    min_confidence = tl.load(min_confidence_ptr)
    if min_confidence > 0:
        block_max = tl.load(partial_max_ptr + part_offs, mask=mask, other=float("-inf"))
        block_sum = tl.load(partial_sum_exp_ptr + part_offs, mask=mask, other=0.0)
        row_max, row_sum = merge_sum_exp(block_max, block_sum)
        temperature = tl.load(temperature_ptr + row)
        logit_ptrs = logits_ptr + draft_row * stride_logits + draft_ids
        logit = tl.load(logit_ptrs, mask=offs_k < num_drafts, other=0.0).to(tl.float32)
        logit = tl.div_rn(logit, tl.where(temperature > 0, temperature, 1.0))
        sure = tl.div_rn(tl.exp(logit - row_max), row_sum) >= min_confidence
        # The first token below min_confidence is still proposed.
        draft_len = tl.minimum(draft_len, tl.min(tl.where(sure, num_drafts, offs_k), 0) + 1)
    draft_tokens = tl.where(offs_k < draft_len, draft_tokens, -1)
    tl.store(draft_tokens_ptr + row * stride_draft_tokens + offs_k, draft_tokens, mask=offs_k < num_drafts)


sample_block = define_op("spec_decode::sample_block", SampleBlock, mutates=("draft_tokens", "draft_logits"))
