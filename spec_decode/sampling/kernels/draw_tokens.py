"""Draw the target's token of each row: the argmax, or a sample with the noise of its seed and position."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling import noise
from spec_decode.sampling.kernels.vocab_blocks import merge_argmax, vocab_block
from spec_decode.sampling.noise import triton_gumbel, triton_key


class Residual(NamedTuple):
    """What a verified draft leaves to draw from: max(w p - q, 0) where a token was rejected, else p. R rows.

    - accepted      int64 [R]        draft tokens accepted; the token after them is drawn, from this column's logits
    - weight        fp32 [R]         w; 0 where nothing was rejected: p is drawn from
    - norms         fp32 [4, R * K]  of each column of p and then of q: the largest logit, and the sum of
                                     exp(logit - largest); read only where weight is above 0
    - draft_logits  fp32 [R, K, V]   q's
    """

    accepted: torch.Tensor
    weight: torch.Tensor
    norms: torch.Tensor
    draft_logits: torch.Tensor

    @classmethod
    def allocate(cls, draft_logits: torch.Tensor) -> Residual:
        """With memory for a kernel to write to; draft_logits fp32 [R, K, V]."""
        (rows, columns, _), device = draft_logits.shape, draft_logits.device
        accepted = torch.empty(rows, dtype=torch.int64, device=device)
        weight = torch.empty(rows, dtype=torch.float32, device=device)
        return cls(accepted, weight, torch.empty(4, rows * columns, dtype=torch.float32, device=device), draft_logits)


class DrawTokens(NamedTuple):
    """int64 [R]: a row's argmax where temperature is 0, else a draw from its softmax; of equal logits the first wins.

    - processed    fp32 [R, V], contiguous processed logits
    - temperature  fp32 [R]
    - seeds        int64 [R], contiguous
    - positions    int64 [R], contiguous: the absolute positions of the tokens drawn
    """

    processed: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor

    def reference(self) -> torch.Tensor:
        keys = noise.key(self.seeds, self.positions, noise.TARGET)
        perturbed = self.processed + noise.gumbel(keys[:, None], torch.arange(self.processed.shape[1])[None])
        return torch.where(self.temperature > 0, perturbed.argmax(-1), self.processed.argmax(-1))

    def launch(self) -> torch.Tensor:
        return launch_draw(self.processed[:, None], *self[1:], None)

    def fake(self) -> torch.Tensor:
        return torch.empty_like(self.positions)


def launch_draw(
    processed: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    residual: Residual | None,
) -> torch.Tensor:
    """Launch the kernels; int64 [R], a token of each row of processed fp32 [R, G, V].

    Without a residual, column 0 is drawn from, at `positions`; else column `accepted`, at positions + accepted, where
    the residual is of G - 1 draft tokens.
    """
    (rows, group, vocab), device = processed.shape, processed.device
    block = vocab_block(vocab)
    blocks = triton.cdiv(vocab, block)
    # A plane of draws from p, and one from the residual.
    planes = 1 if residual is None else 2
    partial_score = torch.empty(planes, rows, blocks, dtype=torch.float32, device=device)
    partial_index = torch.empty(planes, rows, blocks, dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    _block_draw_kernel[(rows, blocks)](
        processed,
        temperature,
        seeds,
        positions,
        *(residual or (None, None, None, None)),
        partial_score,
        partial_index,
        group,
        vocab,
        *(residual.draft_logits.stride() if residual else (0, 0, 0)),
        STREAM=noise.TARGET,
        BLOCK=block,
        # Few logits a thread, as in a drafter's sampling: noise is arithmetic.
        num_warps=max(1, min(8, block // 128)),
        **dependent_launch(device),
    )
    store_draw_kernel[(rows,)](
        partial_score,
        partial_index,
        tokens,
        vocab,
        blocks,
        RESIDUAL=residual is not None,
        BLOCK=triton.next_power_of_2(blocks),
        num_warps=1,
        **dependent_launch(device),
    )
    return tokens


@triton.jit
def _block_draw_kernel(
    processed,  # fp32 [R, G, V]
    temperature,  # fp32 [R]
    seeds,  # int64 [R]
    positions,  # int64 [R]
    accepted,  # int64 [R], or None without a residual; the next three likewise
    weights,  # fp32 [R]
    norms,  # fp32 [4, R * (G - 1)]
    draft_logits,  # fp32 [R, G - 1, V]
    partial_score,  # out: fp32 [1, R, blocks]; with a residual fp32 [2, R, blocks], of p and of it
    partial_index,  # out: int32 of the same shape
    group,  # G
    vocab,  # V
    draft_row_stride,
    draft_column_stride,
    draft_token_stride,
    STREAM: tl.constexpr,  # of the noise
    BLOCK: tl.constexpr,  # logits of a program
    PDL: tl.constexpr,
):
    """One program per row and block of the vocabulary: the block's best token of p, and of the residual."""
    await_previous(PDL)
    # The column that is drawn from, and its position
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    rows, blocks = tl.num_programs(0), tl.num_programs(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    row_temperature = tl.load(temperature + row)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    line = row * group
    weight = 0.0
    if accepted is not None:
        column = tl.load(accepted + row)
        line += column
        position += column
        if row_temperature > 0:
            weight = tl.load(weights + row)
    # The best of p
    x = tl.load(processed + line * vocab + token, mask=inside, other=float("-inf"))
    gumbel = tl.zeros((BLOCK,), tl.float32)
    if row_temperature > 0:
        gumbel = triton_gumbel(triton_key(seed, position, STREAM), token)
    best, first = tl.max(x + gumbel, 0, return_indices=True)
    part = row * blocks + block
    # The best of the residual, with the same noise
    if accepted is not None:
        score = tl.full((BLOCK,), float("-inf"), tl.float32)
        if weight > 0:
            y = draft_logits + row * draft_row_stride + column * draft_column_stride + token * draft_token_stride
            y = tl.load(y, mask=inside, other=float("-inf"))
            at = row * (group - 1) + column
            score = tl.log(residual_weight(x, y, weight, norms, at, rows * (group - 1))) + gumbel
        residual_best, residual_first = tl.max(score, 0, return_indices=True)
        tl.store(partial_score + rows * blocks + part, residual_best)
        tl.store(partial_index + rows * blocks + part, block * BLOCK + residual_first)
    tl.store(partial_score + part, best)
    tl.store(partial_index + part, block * BLOCK + first)


@triton.jit
def residual_weight(
    x,  # fp32 [BLOCK]
    y,  # fp32 [BLOCK]
    weight,
    norms,  # fp32 [4, count]
    at,
    count,
):
    """max(weight p - q, 0) of logits x of p and y of q, by Residual's norms of column `at` of `count`."""
    p_scale = tl.div_rn(weight, tl.load(norms + count + at))
    q_scale = tl.div_rn(1.0, tl.load(norms + 3 * count + at))
    p = tl.exp(x - tl.load(norms + at)) * p_scale
    q = tl.exp(y - tl.load(norms + 2 * count + at)) * q_scale
    return tl.maximum(p - q, 0.0)


@triton.jit
def store_draw_kernel(
    partial_score,  # fp32 [R, blocks]; RESIDUAL: fp32 [2, R, blocks], of p and of it
    partial_index,  # int32 of the same shape
    tokens,  # out: int64 [R]
    vocab,  # V
    blocks,  # of the vocabulary
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,  # blocks, rounded up to a power of two
    PDL: tl.constexpr,
):
    """One program per row: its token, the best of its blocks', of the residual's plane where that has any."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    part = row * blocks + block
    _, token = merge_argmax(partial_score + part, partial_index + part, block < blocks)
    if RESIDUAL:
        part += tl.num_programs(0) * blocks
        best, residual_token = merge_argmax(partial_score + part, partial_index + part, block < blocks)
        # The residual is empty where nothing was rejected, or where rounding removed p's difference from q.
        token = tl.where(best > float("-inf"), residual_token, token)
    # Where every logit is NaN none was found; the token must lie in the vocabulary all the same.
    tl.store(tokens + row, tl.minimum(token, vocab - 1).to(tl.int64))


draw_tokens = define_op("spec_decode::draw_tokens", DrawTokens)
