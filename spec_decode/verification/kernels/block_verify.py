"""Block verification of a round's drafts."""

from __future__ import annotations

import torch

from builders.kernels.op_by_schema import define_op_by_schema
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling import noise
from spec_decode.sampling.draft import logits_of_a_program
from spec_decode.sampling.kernels.draw_tokens import Refusal, launch_draw, residual
from spec_decode.verification.kernels.draft_round import (
    SCHEMA,
    Distributions,
    DraftRound,
    Tops,
    coins,
    fake_verify_output,
    launch_tops,
    leading,
    matches,
    probabilities,
    read_draft,
)

_TINY = torch.finfo(torch.float32).tiny


def block_verify(round_: DraftRound) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft tokens kept int64 [R], and the token behind them int64 [R].

    Weights w and how prefixes stand: see BlockVerification. At temperature 0 the longest prefix of argmax tokens is
    kept. The token behind is drawn from max(w p - q, 0) where one was refused, and from p where the draft had ended.
    """
    accepted, next_tokens = _op(*round_.arguments())
    return accepted, next_tokens


def _formula(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    of = Distributions(DraftRound.of(*arguments))
    weights = _weights(of)
    stands = _stands(of, weights)
    lengths = torch.arange(1, 1 + stands.shape[1])
    accepted = torch.where(of.hot, (stands * lengths).amax(1), leading(of.greedy & of.proposed))
    weight = torch.where(accepted > 0, weights.gather(1, (accepted - 1).clamp(min=0)[:, None])[:, 0], 1.0)
    return accepted, of.next_tokens(accepted, weight)


def _weights(of: Distributions) -> torch.Tensor:
    """w(1) to w(K), fp32 [R, K]: a product capped at 1 at each step is, in logarithms, a walk under a ceiling of 0."""
    walk = (of.p_token / of.q_token.clamp(min=_TINY)).log().cumsum(1)
    return (walk - walk.cummax(1).values.clamp(min=0)).exp()


def _stands(of: Distributions, weights: torch.Tensor) -> torch.Tensor:
    """Which prefixes, of lengths 1 to K, stand on their own coin; bool [R, K]."""
    columns = weights.shape[1]
    excess = (weights[:, :-1, None] * of.p[:, 1:columns] - of.q[:, 1:]).clamp_(min=0).sum(-1)
    excess = torch.nn.functional.pad(excess, (0, 1))
    ends = ~torch.nn.functional.pad(of.proposed[:, 1:], (0, 1))
    chance = torch.where(ends, weights, excess)
    whole = torch.where(ends, 1.0, excess + 1 - weights)
    return (of.coin * whole <= chance) & of.proposed


def _launch(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    round_ = DraftRound.of(*arguments)
    tops = launch_tops(round_.processed, round_.draft_logits, round_.temperature)
    refusal = Refusal.allocate(round_.draft_logits)
    weights = _launch_weights(round_, tops, refusal)
    excess = _launch_excess(round_, weights, refusal.norms)
    rows, columns = round_.draft_tokens.shape
    _stand_kernel[(rows,)](
        round_.draft_tokens,
        round_.temperature,
        round_.coin_seeds,
        round_.draft_positions,
        weights,
        excess,
        refusal.column,
        refusal.weight,
        columns,
        tops.index.shape[1],
        STREAM=noise.ACCEPT,
        **tops.options(columns),
        **dependent_launch(tops.index.device),
    )
    own = launch_draw(round_.processed, round_.temperature, round_.seeds, round_.draft_positions, refusal)
    return refusal.column, own


def _launch_weights(round_: DraftRound, tops: Tops, refusal: Refusal) -> torch.Tensor:
    """w(1) to w(K), fp32 [R, K], of hot rows, as far as their draft goes; files greedy rows' verdicts."""
    rows, columns = round_.draft_tokens.shape
    weights = torch.empty(rows, columns, dtype=torch.float32, device=round_.processed.device)
    _weigh_kernel[(rows,)](
        round_.processed,
        round_.draft_tokens,
        round_.draft_logits,
        round_.temperature,
        tops.peak,
        tops.mass,
        tops.index,
        weights,
        refusal.column,
        refusal.norms,
        columns,
        round_.processed.shape[2],
        tops.index.shape[1],
        *round_.draft_logits.stride(),
        TINY=_TINY,
        **tops.options(columns),
        **dependent_launch(tops.index.device),
    )
    return weights


def _launch_excess(round_: DraftRound, weights: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """Sums fp32 [R * (K - 1), blocks], over a block of the vocabulary, of max(w(i) p - q, 0) behind prefix i."""
    rows, columns, vocab = round_.draft_logits.shape
    block = logits_of_a_program(vocab)
    blocks = triton.cdiv(vocab, block)
    excess = torch.empty(rows * (columns - 1), blocks, dtype=torch.float32, device=weights.device)
    if columns > 1:
        _excess_kernel[(rows * (columns - 1), blocks)](
            round_.processed,
            round_.draft_logits,
            round_.temperature,
            weights,
            norms,
            excess,
            rows,
            columns,
            vocab,
            *round_.draft_logits.stride(),
            BLOCK=block,
            num_warps=max(1, min(8, block // 256)),
            **dependent_launch(weights.device),
        )
    return excess


@triton.jit
def _weigh_kernel(
    processed,
    draft_tokens,
    draft_logits,
    temperature,
    peak,
    mass,
    index,
    weights,
    accepted,
    norms,
    columns,
    vocab,
    blocks,
    draft_row_stride,
    draft_column_stride,
    draft_token_stride,
    TINY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_K)
    token, length = read_draft(row, draft_tokens, columns, BLOCK_K)
    if tl.load(temperature + row) > 0:
        p, q = probabilities(
            row, token, length, processed, draft_logits, peak, mass, norms, columns, vocab, blocks,
            draft_row_stride, draft_column_stride, draft_token_stride, BLOCK, BLOCK_K,
        )  # fmt: skip
        ratio = tl.div_rn(p, tl.maximum(q, TINY))
        weight = 1.0
        walked = tl.zeros((BLOCK_K,), tl.float32)
        for at in range(0, length):
            weight = tl.minimum(1.0, weight * tl.sum(tl.where(column == at, ratio, 0.0), 0))
            walked = tl.where(column == at, weight, walked)
        tl.store(weights + row * columns + column, walked, mask=column < length)
    else:
        agreed = matches(row, token, length, peak, index, columns, blocks, BLOCK, BLOCK_K)
        kept = tl.min(tl.where(agreed, columns, column), 0)
        tl.store(accepted + row, tl.minimum(kept, length).to(tl.int64))


@triton.jit
def _excess_kernel(
    processed,
    draft_logits,
    temperature,
    weights,
    norms,
    excess,
    rows,
    columns,
    vocab,
    draft_row_stride,
    draft_column_stride,
    draft_token_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
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
        tl.store(excess + part, tl.sum(residual(x, y, weight, norms, at, rows * columns), 0))


@triton.jit
def _stand_kernel(
    draft_tokens,
    temperature,
    coin_seeds,
    draft_positions,
    weights,
    excess,
    accepted,
    weight,
    columns,
    blocks,
    STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Hot rows' verdicts."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(temperature + row) > 0:
        column = tl.arange(0, BLOCK_K)
        _, length = read_draft(row, draft_tokens, columns, BLOCK_K)
        walked = tl.load(weights + row * columns + column, mask=column < length, other=0.0)
        block = tl.arange(0, BLOCK)[None, :]
        part = (row * (columns - 1) + column[:, None]) * blocks + block
        # Prefix i, at column i - 1, has an excess if a token was proposed behind it.
        goes_on = column + 1 < length
        behind = tl.sum(tl.load(excess + part, mask=goes_on[:, None] & (block < blocks), other=0.0), 1)
        chance = tl.where(goes_on, behind, walked)
        whole = tl.where(goes_on, behind + 1 - walked, 1.0)
        coin = coins(row, coin_seeds, draft_positions, STREAM, BLOCK_K)
        stands = (column < length) & (coin * whole <= chance)
        kept = tl.max(tl.where(stands, column + 1, 0), 0)
        of_kept = tl.where(kept > 0, tl.sum(tl.where(column + 1 == kept, walked, 0.0), 0), 1.0)
        tl.store(accepted + row, kept.to(tl.int64))
        tl.store(weight + row, tl.where(kept < length, of_kept, 0.0))


_op = define_op_by_schema("spec_decode::block_verify", SCHEMA, cpu=_formula, cuda=_launch, fake=fake_verify_output)
