"""What the target step over the running requests reads."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


class PrepareInputs(NamedTuple):
    """R rows; returns the tokens in the cache, int32 [R], and the token ids after them, int64 [R, 1 + K].

    lens         int64 [R]      tokens of prompt and text; the last one is in no cache yet; 0 is padding
    last_tokens  int64 [R]      that last token
    drafts       int64 [R, K]   below 0 where there is none; token 0 is run in its place
    """

    lens: torch.Tensor
    last_tokens: torch.Tensor
    drafts: torch.Tensor

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        token_ids = torch.cat([self.last_tokens[:, None], self.drafts.clamp(min=0)], 1)
        return (self.lens - 1).clamp_(min=0).int(), token_ids

    def launch(self) -> tuple[torch.Tensor, torch.Tensor]:
        context_lens, token_ids = self.fake()
        rows, query_len = token_ids.shape
        _prepare_inputs_kernel[(rows,)](
            *self,
            context_lens,
            token_ids,
            query_len,
            *self.drafts.stride(),
            BLOCK=triton.next_power_of_2(query_len),
            num_warps=1,
            **dependent_launch(self.lens.device),
        )
        return context_lens, token_ids

    def fake(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows, num_drafts = self.drafts.shape
        return self.lens.new_empty(rows, dtype=torch.int32), self.lens.new_empty(rows, 1 + num_drafts)


@triton.jit
def _prepare_inputs_kernel(
    lens,  # int64 [R]
    last_tokens,  # int64 [R]
    drafts,  # int64 [R, K]
    context_lens,  # out: int32 [R]
    token_ids,  # out: int64 [R, 1 + K]
    query_len,  # 1 + K
    row_stride,  # of drafts
    column_stride,  # of drafts
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < query_len
    length = tl.load(lens + row)
    last = tl.load(last_tokens + row)
    draft = tl.load(drafts + row * row_stride + (column - 1) * column_stride, mask=(column > 0) & inside, other=0)
    tl.store(context_lens + row, tl.maximum(length - 1, 0).to(tl.int32))
    tl.store(token_ids + row * query_len + column, tl.where(column > 0, tl.maximum(draft, 0), last), mask=inside)


prepare_inputs = define_op("spec_decode::prepare_inputs", PrepareInputs)
