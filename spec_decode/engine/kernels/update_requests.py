"""What a verdict changes: the texts, the news for the host, and where the drafter's next round starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from builders.errors import require_tensor
from builders.kernels.op_by_schema import define_op_by_schema
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


class Texts(NamedTuple):
    """R texts, written in place but for their ends.

    lens         int64 [R]          tokens
    max_lens     int64 [R]          where they end
    last_tokens  int64 [R]
    news         int64 [R, 2 + K]   of the last pass: draft tokens kept, these tokens, and the target's own behind them
    """

    lens: torch.Tensor
    max_lens: torch.Tensor
    last_tokens: torch.Tensor
    news: torch.Tensor


class NextRound(NamedTuple):
    """What the drafter reads of a pass, R rows, written in place.

    token_ids     int64 [R, 1 + K]   those of the pass
    context_lens  int32 [R]          draft KV tokens before them
    accepted      int32 [R]          draft tokens kept
    next_tokens   int64 [R]          the target's own behind them
    draft_lens    int32 [R]          tokens wanted: never the text's last one, which is the target's own
    """

    token_ids: torch.Tensor
    context_lens: torch.Tensor
    accepted: torch.Tensor
    next_tokens: torch.Tensor
    draft_lens: torch.Tensor


def update_requests(
    accepted: torch.Tensor,
    next_tokens: torch.Tensor,
    token_ids: torch.Tensor,
    drafts: torch.Tensor,
    texts: Texts,
    next_round: NextRound | None,
    *,
    position_offset: int = 0,
) -> None:
    """Lengthen each text by its `accepted` draft tokens and its next token, up to its end; in place.

    accepted, next_tokens int64 [R]; token_ids int64 [R, 1 + K]: those of the pass; drafts int64 [R, K]: of these, what
    was proposed, -1 from its end on. next_round: None without a drafter. position_offset: where the draft counts a
    text's first token. Raises BatchError, with nothing written, for tensors of another shape, dtype or device.
    """
    rows, columns = drafts.shape
    wide, flat, passed = (rows, 2 + columns), (rows,), (rows, 1 + columns)
    given = (accepted.contiguous(), next_tokens.contiguous(), token_ids, drafts, *texts)
    shapes = (flat, flat, passed, (rows, columns), flat, flat, flat, wide)
    names = ("accepted", "next_tokens", "token_ids", "drafts", *Texts._fields)
    for name, tensor, shape in zip(names, given, shapes, strict=True):
        require_tensor(name, tensor, shape=shape, dtype=torch.int64, device=drafts.device)
    if next_round is not None:
        dtypes = (torch.int64, torch.int32, torch.int32, torch.int64, torch.int32)
        for name, tensor, dtype in zip(NextRound._fields, next_round, dtypes, strict=True):
            shape = passed if name == "token_ids" else flat
            require_tensor(name, tensor, shape=shape, dtype=dtype, device=drafts.device)
    _op(*given, list(next_round or ()), position_offset)


def _formula(
    accepted: torch.Tensor,
    next_tokens: torch.Tensor,
    token_ids: torch.Tensor,
    drafts: torch.Tensor,
    lens: torch.Tensor,
    max_lens: torch.Tensor,
    last_tokens: torch.Tensor,
    news: torch.Tensor,
    next_round: Sequence[torch.Tensor],
    position_offset: int,
) -> None:
    if next_round:
        told = NextRound(*next_round)
        told.token_ids.copy_(token_ids)
        told.context_lens.copy_((lens - 1 + position_offset).clamp_(min=0))
        told.accepted.copy_(accepted)
        told.next_tokens.copy_(next_tokens)
    lens.copy_(torch.minimum(lens + accepted + 1, max_lens))
    last_tokens.copy_(next_tokens)
    if next_round:
        told.draft_lens.copy_((max_lens - lens - 1).clamp_(0, drafts.shape[1]))
    news[:, 0] = accepted
    news[:, 1:] = torch.nn.functional.pad(drafts, (0, 1))
    news.scatter_(1, 1 + accepted[:, None], next_tokens[:, None])


def _launch(
    accepted: torch.Tensor,
    next_tokens: torch.Tensor,
    token_ids: torch.Tensor,
    drafts: torch.Tensor,
    lens: torch.Tensor,
    max_lens: torch.Tensor,
    last_tokens: torch.Tensor,
    news: torch.Tensor,
    next_round: Sequence[torch.Tensor],
    position_offset: int,
) -> None:
    rows, columns = drafts.shape
    _update_requests_kernel[(rows,)](
        accepted,
        next_tokens,
        token_ids,
        drafts,
        lens,
        max_lens,
        last_tokens,
        news,
        *(next_round or (None,) * 5),
        position_offset,
        columns,
        *token_ids.stride(),
        *drafts.stride(),
        news.stride(0),
        next_round[0].stride(0) if next_round else 0,
        TELLING=bool(next_round),
        BLOCK=triton.next_power_of_2(2 + columns),
        num_warps=1,
        **dependent_launch(drafts.device),
    )


@triton.jit
def _update_requests_kernel(
    accepted,
    next_tokens,
    token_ids,
    drafts,
    lens,
    max_lens,
    last_tokens,
    news,
    told_ids,
    told_context_lens,
    told_accepted,
    told_next_tokens,
    told_draft_lens,
    position_offset,
    columns,
    ids_row_stride,
    ids_column_stride,
    drafts_row_stride,
    drafts_column_stride,
    news_stride,
    told_stride,
    TELLING: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    kept = tl.load(accepted + row)
    own = tl.load(next_tokens + row)
    length = tl.load(lens + row)
    limit = tl.load(max_lens + row)
    drafted = (place > 0) & (place <= columns)
    said = tl.load(drafts + row * drafts_row_stride + (place - 1) * drafts_column_stride, mask=drafted, other=0)
    said = tl.where(place == 0, kept, tl.where(place == 1 + kept, own, said))
    grown = tl.minimum(length + kept + 1, limit)
    if TELLING:
        passed = place <= columns
        ids = tl.load(token_ids + row * ids_row_stride + place * ids_column_stride, mask=passed)
        tl.store(told_ids + row * told_stride + place, ids, mask=passed)
        tl.store(told_context_lens + row, tl.maximum(length - 1 + position_offset, 0).to(tl.int32))
        tl.store(told_accepted + row, kept.to(tl.int32))
        tl.store(told_next_tokens + row, own)
        tl.store(told_draft_lens + row, tl.minimum(tl.maximum(limit - grown - 1, 0), columns).to(tl.int32))
    tl.store(news + row * news_stride + place, said, mask=place < 2 + columns)
    tl.store(last_tokens + row, own)
    tl.store(lens + row, grown)


_op = define_op_by_schema(
    "spec_decode::update_requests",
    "(Tensor accepted, Tensor next_tokens, Tensor token_ids, Tensor drafts, Tensor(a!) lens, Tensor max_lens, "
    "Tensor(b!) last_tokens, Tensor(c!) news, Tensor(d!)[] next_round, int position_offset) -> ()",
    cpu=_formula,
    cuda=_launch,
)
