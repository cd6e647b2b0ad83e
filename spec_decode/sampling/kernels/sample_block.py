"""Sample all draft tokens of a block at once, and store each with its processed logits up to where a row stops."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling import noise
from spec_decode.sampling.kernels.sample_draft import NO_TOKEN, POSITION_AHEAD
from spec_decode.sampling.kernels.vocab_blocks import merge_sum_exp, store_max_sum_exp, vocab_block
from spec_decode.sampling.noise import triton_gumbel, triton_key


class SampleBlock(NamedTuple):
    """The arguments of the op; DraftSampler documents the buffers, and `sample_block` of it the others.

    logits [R * K, V of the draft] and positions int64 [R * K] are of column k of row r at r * K + k. seq_lens is read.
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
        temperature = self.temperature[:rows].repeat_interleave(columns)
        is_random = temperature > 0
        processed = self.logits.float() / torch.where(is_random, temperature, 1.0)[:, None]
        keys = noise.key(self.seeds[:rows].repeat_interleave(columns), self.positions + POSITION_AHEAD, noise.DRAFT)
        perturbed = processed + noise.gumbel(keys[:, None], ids[None])
        chosen = torch.where(is_random[:, None], perturbed, processed).argmax(-1)
        lengths = self.draft_lens[:rows].clamp(max=self.num_tokens).clamp(max=columns)
        proposes = (self.seq_lens[:rows, None] > 0) & (torch.arange(columns) < lengths[:, None])
        if self.min_confidence > 0:
            sure = processed.softmax(-1).gather(1, chosen[:, None])[:, 0] >= self.min_confidence
            proposes[:, 1:] &= sure.view(rows, columns)[:, :-1].cumprod(1).bool()
        self.draft_logits[:rows, :, ids] = processed.view(rows, columns, vocab)
        self.draft_tokens[:rows] = torch.where(proposes, ids[chosen].view(rows, columns), NO_TOKEN)

    def launch(self) -> None:
        (lines, vocab), columns, device = self.logits.shape, self.draft_tokens.shape[1], self.logits.device
        block = vocab_block(vocab)
        blocks = triton.cdiv(vocab, block)
        partial_score, partial_max, partial_sum_exp = torch.empty(3, lines, blocks, dtype=torch.float32, device=device)
        partial_index = torch.empty(lines, blocks, dtype=torch.int32, device=device)
        _line_argmax_kernel[(lines, blocks)](
            self.logits,
            self.temperature,
            self.seeds,
            self.positions,
            self.draft_logits,
            self.min_confidence,
            self.token_map,
            partial_score,
            partial_max,
            partial_sum_exp,
            partial_index,
            vocab,
            columns,
            self.logits.stride(0),
            *self.draft_logits.stride()[:2],
            STREAM=noise.DRAFT,
            AHEAD=POSITION_AHEAD,
            BLOCK=block,
            # As of a single step: noise is arithmetic.
            num_warps=max(1, min(8, block // 128)),
            **dependent_launch(device),
        )
        parts = triton.next_power_of_2(columns) * triton.next_power_of_2(blocks)
        _store_block_kernel[(lines // columns,)](
            self.logits,
            self.temperature,
            self.seq_lens,
            self.draft_tokens,
            self.draft_lens,
            self.num_tokens,
            self.min_confidence,
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
            num_warps=max(1, min(8, parts // 256)),
            **dependent_launch(device),
        )


@triton.jit
def _line_argmax_kernel(
    logits,  # [rows * K, V of the draft]
    temperature,  # fp32 [R]
    seeds,  # int64 [R]
    positions,  # int64 [rows * K]
    draft_logits,  # out: fp32 [R, K, V]
    min_confidence,  # fp32 [1]
    token_map,  # int64 [V of the draft], or None
    partial_score,  # out: fp32 [rows * K, blocks]
    partial_max,  # out: fp32 [rows * K, blocks]; not written without min_confidence, the next likewise
    partial_sum_exp,  # out: fp32 [rows * K, blocks]
    partial_index,  # out: int32 [rows * K, blocks]
    vocab,  # V of the draft
    columns,  # K
    logits_stride,
    cache_row_stride,  # of draft_logits, as is the next
    cache_column_stride,
    STREAM: tl.constexpr,  # of the noise
    AHEAD: tl.constexpr,  # from an input's position to that of the token it predicts
    BLOCK: tl.constexpr,  # logits of a program
    PDL: tl.constexpr,
):
    """One program per column of a row and block of the vocabulary: process its logits, and find the best token.

    `rows` are the first of the buffers' R.
    """
    await_previous(PDL)
    line = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = line // columns
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    # Every load stands before the first store: after one that may alias it, a load would wait until that is done.
    x = tl.load(logits + line * logits_stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    token = at
    if token_map is not None:
        token = tl.load(token_map + at, mask=inside, other=0)
    row_temperature = tl.load(temperature + row)
    seed = tl.load(seeds + row)
    position = tl.load(positions + line)
    threshold = tl.load(min_confidence)
    # Store the processed logits, which verification reads
    is_random = row_temperature > 0
    if is_random:
        x = tl.div_rn(x, row_temperature)
    tl.store(draft_logits + row * cache_row_stride + line % columns * cache_column_stride + token, x, mask=inside)
    part = line * tl.num_programs(1) + block
    if threshold > 0:
        store_max_sum_exp(x, partial_max + part, partial_sum_exp + part)
    # The best of them, with noise in a random row
    if is_random:
        x = x + triton_gumbel(triton_key(seed, position + AHEAD, STREAM), token)
    best, first = tl.max(x, 0, return_indices=True)
    tl.store(partial_score + part, best)
    tl.store(partial_index + part, block * BLOCK + first)


@triton.jit
def _store_block_kernel(
    logits,  # [rows * K, V of the draft]
    temperature,  # fp32 [R]
    seq_lens,  # int32 [R]
    draft_tokens,  # out: int64 [R, K]
    draft_lens,  # int32 [R]
    num_tokens,  # int32 [1]
    min_confidence,  # fp32 [1]
    token_map,  # int64 [V of the draft], or None
    partial_score,  # fp32 [rows * K, blocks]
    partial_max,  # fp32 [rows * K, blocks]
    partial_sum_exp,  # fp32 [rows * K, blocks]
    partial_index,  # int32 [rows * K, blocks]
    vocab,  # V of the draft
    columns,  # K
    blocks,  # of the vocabulary
    logits_stride,
    tokens_stride,
    BLOCK: tl.constexpr,  # blocks, rounded up to a power of two
    BLOCK_K: tl.constexpr,  # K, likewise
    PDL: tl.constexpr,
):
    """One program per row, of the first of the buffers' R: store its tokens up to where it stops, and none behind."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_K)
    block = tl.arange(0, BLOCK)[None, :]
    line = row * columns + column
    part = line[:, None] * blocks + block
    inside = (column < columns)[:, None] & (block < blocks)
    # The token of each column, the best of its blocks'
    score = tl.load(partial_score + part, mask=inside, other=float("-inf"))
    index = tl.load(partial_index + part, mask=inside, other=2147483647)  # the largest int32
    best = tl.max(score, 1)
    chosen = tl.min(tl.where(score == best[:, None], index, 2147483647), 1)
    # Where every logit is NaN none was found; the token must lie in the vocabulary all the same.
    chosen = tl.minimum(chosen, vocab - 1).to(tl.int64)
    token = chosen
    if token_map is not None:
        token = tl.load(token_map + chosen)
    # How many the row proposes
    length = tl.minimum(tl.minimum(tl.load(draft_lens + row), tl.load(num_tokens)), columns)
    length = tl.where(tl.load(seq_lens + row) > 0, length, 0)
    threshold = tl.load(min_confidence)
    if threshold > 0:
        maxima = tl.load(partial_max + part, mask=inside, other=float("-inf"))
        sums = tl.load(partial_sum_exp + part, mask=inside, other=0.0)
        largest, total = merge_sum_exp(maxima, sums)
        row_temperature = tl.load(temperature + row)
        x = tl.load(logits + line * logits_stride + chosen, mask=column < columns, other=0.0).to(tl.float32)
        x = tl.div_rn(x, tl.where(row_temperature > 0, row_temperature, 1.0))
        sure = tl.div_rn(tl.exp(x - largest), total) >= threshold
        # The token of the first column that is not sure is still proposed.
        length = tl.minimum(length, tl.min(tl.where(sure, columns, column), 0) + 1)
    tl.store(draft_tokens + row * tokens_stride + column, tl.where(column < length, token, -1), mask=column < columns)


sample_block = define_op("spec_decode::sample_block", SampleBlock, mutates=("draft_tokens", "draft_logits"))
