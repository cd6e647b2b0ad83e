"""Token-wise rejection sampling of a round's drafts."""

from __future__ import annotations

import torch

from builders.kernels.op_by_schema import define_op_by_schema
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling import noise
from spec_decode.sampling.kernels.draw_tokens import Refusal, launch_draw
from spec_decode.verification.kernels.draft_round import (
    SCHEMA,
    Distributions,
    DraftRound,
    coins,
    fake_verify_output,
    launch_tops,
    leading,
    matches,
    probabilities,
    read_draft,
)


def rejection_sample(round_: DraftRound) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft tokens kept int64 [R], and the token behind them int64 [R].

    Kept is the longest prefix whose every token d passes p(d) > coin * q(d), or at temperature 0 is p's argmax. The
    token behind it is drawn from max(p - q, 0) where one was refused, and from p where the draft had ended.
    """
    accepted, next_tokens = _op(*round_.arguments())
    return accepted, next_tokens


def _formula(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    of = Distributions(DraftRound.of(*arguments))
    # Strictly less: a product that underflows to 0 must not keep a token that the target cannot produce.
    agreed = torch.where(of.hot[:, None], of.coin * of.q_token < of.p_token, of.greedy)
    accepted = leading(agreed & of.proposed)
    return accepted, of.next_tokens(accepted, torch.ones(len(accepted)))


def _launch(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    round_ = DraftRound.of(*arguments)
    rows, columns = round_.draft_tokens.shape
    tops = launch_tops(round_.processed, round_.draft_logits, round_.temperature)
    refusal = Refusal.allocate(round_.draft_logits)
    _reject_kernel[(rows,)](
        *arguments,
        tops.peak,
        tops.mass,
        tops.index,
        refusal.column,
        refusal.weight,
        refusal.norms,
        columns,
        round_.processed.shape[2],
        tops.index.shape[1],
        *round_.draft_logits.stride(),
        STREAM=noise.ACCEPT,
        **tops.options(columns),
        **dependent_launch(tops.index.device),
    )
    own = launch_draw(round_.processed, round_.temperature, round_.seeds, round_.draft_positions, refusal)
    return refusal.column, own


@triton.jit
def _reject_kernel(
    processed,
    draft_tokens,
    draft_logits,
    temperature,
    seeds,
    coin_seeds,
    draft_positions,
    peak,
    mass,
    index,
    accepted,
    weight,
    norms,
    columns,
    vocab,
    blocks,
    draft_row_stride,
    draft_column_stride,
    draft_token_stride,
    STREAM: tl.constexpr,
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
        agreed = coins(row, coin_seeds, draft_positions, STREAM, BLOCK_K) * q < p
    else:
        agreed = matches(row, token, length, peak, index, columns, blocks, BLOCK, BLOCK_K)
    kept = tl.min(tl.where(agreed, columns, column), 0)
    tl.store(accepted + row, tl.minimum(kept, length).to(tl.int64))
    tl.store(weight + row, tl.where(kept < length, 1.0, 0.0))


_op = define_op_by_schema("spec_decode::rejection_sample", SCHEMA, cpu=_formula, cuda=_launch, fake=fake_verify_output)
