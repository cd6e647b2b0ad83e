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
            self.logits,
            self.temperature,
            self.seeds,
            self.positions,
            self.step,
            self.draft_logits,
            self.min_confidence,
            self.continue_flag,
            self.token_map,
            self.hidden,
            self.next_hidden,
            partial_score,
            partial_max,
            partial_sum_exp,
            partial_index,
            vocab,
            columns,
            self.logits.stride(0),
            *self.draft_logits.stride()[:2],
            *hidden_strides,
            STREAM=noise.DRAFT,
            AHEAD=POSITION_AHEAD,
            WIDTH=width,
            SHARE=triton.next_power_of_2(triton.cdiv(width, blocks)),
            BLOCK=block,
            # Four logits a thread: noise costs so much arithmetic that few threads, not memory, would set the pace.
            num_warps=max(1, min(8, block // 128)),
            **dependent_launch(device),
        )
        _store_token_kernel[(rows,)](
            self.logits,
            self.temperature,
            self.seq_lens,
            self.step,
            self.draft_tokens,
            self.next_ids,
            self.draft_lens,
            self.num_tokens,
            self.min_confidence,
            self.continue_flag,
            self.token_map,
            partial_score,
            partial_max,
            partial_sum_exp,
            partial_index,
            vocab,
            columns,
            blocks,
            self.logits.stride(0),
            self.draft_tokens.stride(0),
            BLOCK=triton.next_power_of_2(blocks),
            BLOCK_K=triton.next_power_of_2(columns),
            num_warps=1,
            **dependent_launch(device),
        )


@triton.jit
def _block_argmax_kernel(
    logits,  # [rows, V of the draft]
    temperature,  # fp32 [R]
    seeds,  # int64 [R]
    positions,  # int64 [>= R]
    step,  # int64 [1]
    draft_logits,  # out: fp32 [R, K, V]
    min_confidence,  # fp32 [1]
    continue_flag,  # out: int32 [1]
    token_map,  # int64 [V of the draft], or None
    hidden,  # [rows, H], or None
    next_hidden,  # out: [rows, H], or None
    partial_score,  # out: fp32 [rows, blocks]
    partial_max,  # out: fp32 [rows, blocks]; not written without min_confidence, the next likewise
    partial_sum_exp,  # out: fp32 [rows, blocks]
    partial_index,  # out: int32 [rows, blocks]
    vocab,  # V of the draft
    columns,  # K
    logits_stride,
    cache_row_stride,  # of draft_logits, as is the next
    cache_column_stride,
    hidden_stride,
    next_hidden_stride,
    STREAM: tl.constexpr,  # of the noise
    AHEAD: tl.constexpr,  # from an input's position to that of the token it predicts
    WIDTH: tl.constexpr,  # H; 0 without hidden
    SHARE: tl.constexpr,  # of H, that a program copies
    BLOCK: tl.constexpr,  # logits of a program
    PDL: tl.constexpr,
):
    """One program per row and block of the vocabulary: process its logits, and find the best token.

    `rows` are the first of the buffers' R.
    """
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    # Every load stands before the first store: after one that may alias it, a load would wait until that is done.
    x = tl.load(logits + row * logits_stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    token = at
    if token_map is not None:
        token = tl.load(token_map + at, mask=inside, other=0)
    row_temperature = tl.load(temperature + row)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    column = tl.load(step)
    threshold = tl.load(min_confidence)
    # This program's share of the hidden states
    if WIDTH > 0:
        dim = block * SHARE + tl.arange(0, SHARE)
        state = tl.load(hidden + row * hidden_stride + dim, mask=dim < WIDTH)
        tl.store(next_hidden + row * next_hidden_stride + dim, state, mask=dim < WIDTH)
    # Store the processed logits, which verification reads
    is_random = row_temperature > 0
    if is_random:
        x = tl.div_rn(x, row_temperature)
    cached = draft_logits + row * cache_row_stride + column * cache_column_stride + token
    tl.store(cached, x, mask=inside & (column < columns))
    part = row * tl.num_programs(1) + block
    if (row == 0) & (block == 0):
        # The next kernel sets it where a row continues.
        tl.store(continue_flag, 0)
    if threshold > 0:
        store_max_sum_exp(x, partial_max + part, partial_sum_exp + part)
    # The best of them, with noise in a random row
    if is_random:
        x = x + triton_gumbel(triton_key(seed, position + AHEAD, STREAM), token)
    best, first = tl.max(x, 0, return_indices=True)
    tl.store(partial_score + part, best)
    tl.store(partial_index + part, block * BLOCK + first)


@triton.jit
def _store_token_kernel(
    logits,  # [rows, V of the draft]
    temperature,  # fp32 [R]
    seq_lens,  # in and out: int32 [R]
    step,  # int64 [1]
    draft_tokens,  # out: int64 [R, K]
    next_ids,  # out: int64 [R]
    draft_lens,  # int32 [R]
    num_tokens,  # int32 [1]
    min_confidence,  # fp32 [1]
    continue_flag,  # out: int32 [1]
    token_map,  # int64 [V of the draft], or None
    partial_score,  # fp32 [rows, blocks]
    partial_max,  # fp32 [rows, blocks]
    partial_sum_exp,  # fp32 [rows, blocks]
    partial_index,  # int32 [rows, blocks]
    vocab,  # V of the draft
    columns,  # K
    blocks,  # of the vocabulary
    logits_stride,
    tokens_stride,
    BLOCK: tl.constexpr,  # blocks, rounded up to a power of two
    BLOCK_K: tl.constexpr,  # K, likewise
    PDL: tl.constexpr,
):
    """One program per row, of the first of the buffers' R: store its token, and decide whether it continues."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    inside = block < blocks
    part = row * blocks + block
    seq_len = tl.load(seq_lens + row)
    column = tl.load(step)
    length = tl.minimum(tl.minimum(tl.load(draft_lens + row), tl.load(num_tokens)), columns)
    threshold = tl.load(min_confidence)
    # The token, the best of the blocks'
    _, chosen = merge_argmax(partial_score + part, partial_index + part, inside)
    # Where every logit is NaN none was found; the token must lie in the vocabulary all the same.
    chosen = tl.minimum(chosen, vocab - 1).to(tl.int64)
    token = chosen
    if token_map is not None:
        token = tl.load(token_map + chosen)
    # Whether the row proposes it, and then another
    proposes = (seq_len > 0) & (column < length)
    continues = proposes & (column + 1 < length)
    if threshold > 0:
        maxima = tl.load(partial_max + part, mask=inside, other=float("-inf"))
        sums = tl.load(partial_sum_exp + part, mask=inside, other=0.0)
        largest, total = merge_sum_exp(maxima, sums)
        row_temperature = tl.load(temperature + row)
        score = tl.load(logits + row * logits_stride + chosen).to(tl.float32)
        score = tl.div_rn(score, tl.where(row_temperature > 0, row_temperature, 1.0))
        continues = continues & (tl.div_rn(tl.exp(score - largest), total) >= threshold)
    stored = draft_tokens + row * tokens_stride
    if column == 0:
        others = tl.arange(0, BLOCK_K)
        tl.store(stored + others, -1, mask=(others > 0) & (others < columns))
    tl.store(stored + column, tl.where(proposes, token, -1), mask=column < columns)
    tl.store(next_ids + row, tl.where(proposes, token, 0))
    tl.store(seq_lens + row, tl.where(continues, seq_len, 0))
    tl.store(continue_flag, 1, mask=continues)


sample_draft = define_op(
    "spec_decode::sample_draft",
    SampleDraft,
    mutates=("seq_lens", "draft_tokens", "draft_logits", "next_ids", "continue_flag", "next_hidden"),
)
