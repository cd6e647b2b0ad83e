"""What the target's pass over the running requests reads."""

from __future__ import annotations

import torch

from builders.errors import require_tensor
from builders.kernels.op_by_schema import define_op_by_schema
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


def prepare_inputs(
    lens: torch.Tensor, last_tokens: torch.Tensor, drafts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens in the cache, int32 [R], and token ids int64 [R, 1 + K] behind them.

    lens int64 [R]: tokens of the text, whose last one, of last_tokens int64 [R], is in no cache yet; 0 is padding.
    drafts int64 [R, K]: below 0 where there is none, for which token 0 stands. Raises BatchError for other tensors.
    """
    rows, device = len(drafts), drafts.device
    require_tensor("lens", lens, shape=(rows,), dtype=torch.int64, device=device)
    require_tensor("last_tokens", last_tokens, shape=(rows,), dtype=torch.int64, device=device)
    require_tensor("drafts", drafts, shape=(rows, None), dtype=torch.int64, device=device)
    context_lens, token_ids = _op(lens, last_tokens, drafts)
    return context_lens, token_ids


def _formula(lens: torch.Tensor, last_tokens: torch.Tensor, drafts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (lens - 1).clamp_(min=0).int(), torch.cat([last_tokens[:, None], drafts.clamp(min=0)], 1)


def _launch(lens: torch.Tensor, last_tokens: torch.Tensor, drafts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    context_lens, token_ids = _fake(lens, last_tokens, drafts)
    rows, query_len = token_ids.shape
    _prepare_inputs_kernel[(rows,)](
        lens,
        last_tokens,
        drafts,
        context_lens,
        token_ids,
        query_len,
        *drafts.stride(),
        BLOCK=triton.next_power_of_2(query_len),
        num_warps=1,
        **dependent_launch(lens.device),
    )
    return context_lens, token_ids


def _fake(lens: torch.Tensor, last_tokens: torch.Tensor, drafts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = drafts.shape
    return lens.new_empty(rows, dtype=torch.int32), lens.new_empty(rows, 1 + columns)


@triton.jit
def _prepare_inputs_kernel(
    lens,
    last_tokens,
    drafts,
    context_lens,
    token_ids,
    query_len,
    row_stride,
    column_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < query_len
    length = tl.load(lens + row)
    last = tl.load(last_tokens + row)
    draft = tl.load(drafts + row * row_stride + (place - 1) * column_stride, mask=(place > 0) & inside, other=0)
    tl.store(context_lens + row, tl.maximum(length - 1, 0).to(tl.int32))
    tl.store(token_ids + row * query_len + place, tl.where(place > 0, tl.maximum(draft, 0), last), mask=inside)


_op = define_op_by_schema(
    "spec_decode::prepare_inputs",
    "(Tensor lens, Tensor last_tokens, Tensor drafts) -> (Tensor, Tensor)",
    cpu=_formula,
    cuda=_launch,
    fake=_fake,
)
