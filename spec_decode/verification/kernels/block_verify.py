"""Block verification of a round's drafts."""

from __future__ import annotations

import torch

from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling.kernels.draw_tokens import Residual, launch_draw, residual_weight
from spec_decode.sampling.kernels.vocab_blocks import vocab_block
from spec_decode.verification.kernels.distributions import Distributions, count_leading
from spec_decode.verification.kernels.draft_probabilities import (
    accept_uniform,
    draft_probabilities,
    matches_argmax,
    read_draft,
)
from spec_decode.verification.kernels.partial_max import PartialMax
from spec_decode.verification.kernels.verify_arguments import VerifyArguments

_TINY = torch.finfo(torch.float32).tiny


class BlockVerify(VerifyArguments):
    """Accepts the longest prefix that passes, by the weights w that BlockVerification defines; at temperature 0 the
    longest prefix of argmax tokens.

    The token after it is drawn from max(w p - q, 0) where one was rejected, and from p where the draft ended.
    """

    __slots__ = ()

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        models = Distributions(self)
        weights = _prefix_weights(models)
        passes = _passing_prefixes(models, weights)
        lengths = torch.arange(1, 1 + passes.shape[1])
        greedy = count_leading(models.is_argmax & models.proposed)
        accepted = torch.where(models.is_random, (passes * lengths).amax(1), greedy)
        weight = torch.where(accepted > 0, weights.gather(1, (accepted - 1).clamp(min=0)[:, None])[:, 0], 1.0)
        return accepted, models.next_tokens(accepted, weight)

    def launch(self) -> tuple[torch.Tensor, torch.Tensor]:
        processed, draft_tokens, draft_logits, temperature, seeds, accept_seeds, draft_positions = self
        (rows, columns, vocab), device = draft_logits.shape, processed.device
        strides = draft_logits.stride()
        block = vocab_block(vocab)
        blocks = triton.cdiv(vocab, block)
        partial, residual = PartialMax.launch(self), Residual.allocate(draft_logits)
        weights = torch.empty(rows, columns, dtype=torch.float32, device=device)
        residual_sums = torch.empty(rows * (columns - 1), blocks, dtype=torch.float32, device=device)
        options = partial.launch_options(columns)
        _prefix_weights_kernel[(rows,)](
            processed,
            draft_tokens,
            draft_logits,
            temperature,
            *partial,
            weights,
            residual.accepted,
            residual.norms,
            columns,
            vocab,
            blocks,
            *strides,
            TINY=_TINY,
            **options,
            **dependent_launch(device),
        )
        if columns > 1:
            _residual_sums_kernel[(rows * (columns - 1), blocks)](
                processed,
                draft_logits,
                temperature,
                weights,
                residual.norms,
                residual_sums,
                rows,
                columns,
                vocab,
                *strides,
                BLOCK=block,
                num_warps=max(1, min(8, block // 256)),
                **dependent_launch(device),
            )
        _accept_prefix_kernel[(rows,)](
            draft_tokens,
            temperature,
            accept_seeds,
            draft_positions,
            weights,
            residual_sums,
            residual.accepted,
            residual.weight,
            columns,
            blocks,
            **options,
            **dependent_launch(device),
        )
        return residual.accepted, launch_draw(processed, temperature, seeds, draft_positions, residual)


def _prefix_weights(models: Distributions) -> torch.Tensor:
    """w(1) to w(K), fp32 [R, K]: a product capped at 1 at each step is, in logarithms, a walk under a ceiling of 0."""
    walk = (models.p_token / models.q_token.clamp(min=_TINY)).log().cumsum(1)
    return (walk - walk.cummax(1).values.clamp(min=0)).exp()


def _passing_prefixes(models: Distributions, weights: torch.Tensor) -> torch.Tensor:
    """Which prefixes, of lengths 1 to K, pass with their own uniform; bool [R, K]."""
    columns = weights.shape[1]
    residual_sum = (weights[:, :-1, None] * models.p[:, 1:columns] - models.q[:, 1:]).clamp_(min=0).sum(-1)
    residual_sum = torch.nn.functional.pad(residual_sum, (0, 1))
    ends = ~torch.nn.functional.pad(models.proposed[:, 1:], (0, 1))
    chance = torch.where(ends, weights, residual_sum)
    whole = torch.where(ends, 1.0, residual_sum + 1 - weights)
    return (models.uniform * whole <= chance) & models.proposed


@triton.jit
def _prefix_weights_kernel(
    processed,  # fp32 [R, 1 + K, V]
    draft_tokens,  # int64 [R, K]
    draft_logits,  # fp32 [R, K, V]
    temperature,  # fp32 [R]
    partial_max,  # fp32 [2, R * K, blocks]
    partial_sum_exp,  # fp32 [2, R * K, blocks]
    partial_argmax,  # int32 [R * K, blocks]
    weights,  # out: fp32 [R, K]
    accepted,  # out: int64 [R], of greedy rows
    norms,  # out: fp32 [4, R * K]
    columns,  # K
    vocab,  # V
    blocks,  # of the vocabulary
    draft_row_stride,
    draft_column_stride,
    draft_token_stride,
    TINY: tl.constexpr,  # the smallest normal fp32
    BLOCK: tl.constexpr,  # blocks, rounded up to a power of two
    BLOCK_K: tl.constexpr,  # K, likewise
    PDL: tl.constexpr,
):
    """One program per row: w(1) to w(K) of a random row, as far as its draft goes, and its norms; a greedy row's
    `accepted`.
    """
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_K)
    token, length = read_draft(row, draft_tokens, columns, BLOCK_K)
    if tl.load(temperature + row) > 0:
        p, q = draft_probabilities(
            row,
            token,
            length,
            processed,
            draft_logits,
            partial_max,
            partial_sum_exp,
            norms,
            columns,
            vocab,
            blocks,
            draft_row_stride,
            draft_column_stride,
            draft_token_stride,
            BLOCK,
            BLOCK_K,
        )
        # The weights, one token after another. One that is no number keeps no draft; by themselves, minimum and maximum
        # drop it.
        ratio = tl.div_rn(p, tl.maximum(q, TINY, propagate_nan=tl.PropagateNan.ALL))
        weight = 1.0
        row_weights = tl.zeros((BLOCK_K,), tl.float32)
        for at in range(0, length):
            product = weight * tl.sum(tl.where(column == at, ratio, 0.0), 0)
            weight = tl.minimum(1.0, product, propagate_nan=tl.PropagateNan.ALL)
            row_weights = tl.where(column == at, weight, row_weights)
        tl.store(weights + row * columns + column, row_weights, mask=column < length)
    else:
        passes = matches_argmax(row, token, length, partial_max, partial_argmax, columns, blocks, BLOCK, BLOCK_K)
        count = tl.min(tl.where(passes, columns, column), 0)
        tl.store(accepted + row, tl.minimum(count, length).to(tl.int64))


@triton.jit
def _residual_sums_kernel(
    processed,  # fp32 [R, 1 + K, V]
    draft_logits,  # fp32 [R, K, V]
    temperature,  # fp32 [R]
    weights,  # fp32 [R, K]
    norms,  # fp32 [4, R * K]
    residual_sums,  # out: fp32 [R * (K - 1), blocks]
    rows,  # R
    columns,  # K
    vocab,  # V
    draft_row_stride,
    draft_column_stride,
    draft_token_stride,
    BLOCK: tl.constexpr,  # logits of a program
    PDL: tl.constexpr,
):
    """One program per prefix i of a row, of 1 to K - 1, and block of the vocabulary: the block's sum of
    max(w(i) p - q, 0) at the column after the prefix.
    """
    await_previous(PDL)
    line = tl.program_id(0).to(tl.int64)
    row, column = line // (columns - 1), 1 + line % (columns - 1)
    if tl.load(temperature + row) > 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab
        at = row * columns + column
        weight = tl.load(weights + at - 1)
        x = tl.load(processed + (at + row) * vocab + token, mask=inside, other=float("-inf"))
        y = draft_logits + row * draft_row_stride + column * draft_column_stride + token * draft_token_stride
        y = tl.load(y, mask=inside, other=float("-inf"))
        part = line * tl.num_programs(1) + tl.program_id(1)
        tl.store(residual_sums + part, tl.sum(residual_weight(x, y, weight, norms, at, rows * columns), 0))


@triton.jit
def _accept_prefix_kernel(
    draft_tokens,  # int64 [R, K]
    temperature,  # fp32 [R]
    accept_seeds,  # int64 [R]
    draft_positions,  # int64 [R]
    weights,  # fp32 [R, K]
    residual_sums,  # fp32 [R * (K - 1), blocks]
    accepted,  # out: int64 [R], of random rows
    weight,  # out: fp32 [R], of random rows
    columns,  # K
    blocks,  # of the vocabulary
    BLOCK: tl.constexpr,  # blocks, rounded up to a power of two
    BLOCK_K: tl.constexpr,  # K, likewise
    PDL: tl.constexpr,
):
    """One program per row: the longest prefix of a random row that passes."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(temperature + row) > 0:
        column = tl.arange(0, BLOCK_K)
        _, length = read_draft(row, draft_tokens, columns, BLOCK_K)
        # The weight of each prefix, and its residual's sum
        row_weights = tl.load(weights + row * columns + column, mask=column < length, other=0.0)
        block = tl.arange(0, BLOCK)[None, :]
        part = (row * (columns - 1) + column[:, None]) * blocks + block
        # Prefix i, at column i - 1, has a residual if a token was proposed after it.
        continues = column + 1 < length
        residual_sum = tl.sum(tl.load(residual_sums + part, mask=continues[:, None] & (block < blocks), other=0.0), 1)
        # Which prefixes pass, and the longest of them
        chance = tl.where(continues, residual_sum, row_weights)
        whole = tl.where(continues, residual_sum + 1 - row_weights, 1.0)
        uniform = accept_uniform(tl.load(accept_seeds + row), tl.load(draft_positions + row) + column)
        passes = (column < length) & (uniform * whole <= chance)
        count = tl.max(tl.where(passes, column + 1, 0), 0)
        of_prefix = tl.where(count > 0, tl.sum(tl.where(column + 1 == count, row_weights, 0.0), 0), 1.0)
        tl.store(accepted + row, count.to(tl.int64))
        tl.store(weight + row, tl.where(count < length, of_prefix, 0.0))


block_verify = define_op("spec_decode::block_verify", BlockVerify)
