"""The inputs of the target step over the running requests."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


class PrepareInputs(NamedTuple):
    """Return context lengths, int32 [R], and the token ids after them, int64 [R, 1 + K].

    lens         int64 [R]      tokens of prompt and text; the last one is not cached yet; 0 is padding
    last_tokens  int64 [R]      that last token
    drafts       int64 [R, K]   negative where none is proposed; token 0 is run instead
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
            lens_ptr=self.lens,
            last_tokens_ptr=self.last_tokens,
            drafts_ptr=self.drafts,
            context_lens_ptr=context_lens,
            token_ids_ptr=token_ids,
            query_len=query_len,
            stride_drafts_row=self.drafts.stride(0),
            stride_drafts_col=self.drafts.stride(1),
            BLOCK_Q=next_power_of_2(query_len),
            num_warps=1,
            **dependent_launch(self.lens.device),
        )
        return context_lens, token_ids

    def fake(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows, num_drafts = self.drafts.shape
        return self.lens.new_empty(rows, dtype=torch.int32), self.lens.new_empty(rows, 1 + num_drafts)


@triton.jit
def _prepare_inputs_kernel(
    lens_ptr,  # int64 [R]
    last_tokens_ptr,  # int64 [R]
    drafts_ptr,  # int64 [R, K]
    context_lens_ptr,  # out: int32 [R]
    token_ids_ptr,  # out: int64 [R, 1 + K]
    query_len,  # 1 + K
    stride_drafts_row,
    stride_drafts_col,
    BLOCK_Q: tl.constexpr,  # query_len, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """token_ids = last_token | drafts, context_len = num_tokens - 1. One program per row."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs_q = tl.arange(0, BLOCK_Q)
    mask = offs_q < query_len
    num_tokens = tl.load(lens_ptr + row)
    last_token = tl.load(last_tokens_ptr + row)
    draft_ptrs = drafts_ptr + row * stride_drafts_row + (offs_q - 1) * stride_drafts_col
    draft = tl.load(draft_ptrs, mask=(offs_q > 0) & mask, other=0)
    tl.store(context_lens_ptr + row, tl.maximum(num_tokens - 1, 0).to(tl.int32))
    token_ids = tl.where(offs_q > 0, tl.maximum(draft, 0), last_token)
    tl.store(token_ids_ptr + row * query_len + offs_q, token_ids, mask=mask)


prepare_inputs = define_op("spec_decode::prepare_inputs", PrepareInputs)
