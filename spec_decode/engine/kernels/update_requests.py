"""Apply a verification result: update the requests, the host output, and the drafter's next inputs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling.kernels.edit_logits import has_penalties, is_penalised


class UpdateRequests(NamedTuple):
    """Extend R requests by their accepted draft tokens and their next token, up to their end; in place.

    accepted            int64 [R]          number of accepted draft tokens
    next_tokens         int64 [R]          the target's own token after them; -1, which only the host sees, if it has
                                           none: the next step then runs token 0, until the host has ended the request
    token_ids           int64 [R, 1 + K]   the tokens of the step
    drafts              int64 [R, K]       the proposed part of them; -1 after the last
    lens                int64 [R]          tokens of prompt and text; written
    max_lens            int64 [R]          where the text ends
    last_tokens         int64 [R]          written
    outputs             int64 [R, 2 + K]   written: number of accepted draft tokens, these, the target's next token
    draft_token_ids     int64 [R, 1 + K]   written, like the next four, for the drafter; None without one
    draft_context_lens  int32 [R]          draft KV tokens before those of the step
    draft_accepted      int32 [R]
    draft_next_tokens   int64 [R]
    draft_lens          int32 [R]          draft tokens to propose: a text's last token always comes from the target
    position_offset     the draft's position of a text's first token
    penalties           fp32 [R, 3], like counts of LogitEdits, or None
    counts              int32 [R, V], in rows with penalties the new tokens are added
    """

    accepted: torch.Tensor
    next_tokens: torch.Tensor
    token_ids: torch.Tensor
    drafts: torch.Tensor
    lens: torch.Tensor
    max_lens: torch.Tensor
    last_tokens: torch.Tensor
    outputs: torch.Tensor
    draft_token_ids: torch.Tensor | None = None
    draft_context_lens: torch.Tensor | None = None
    draft_accepted: torch.Tensor | None = None
    draft_next_tokens: torch.Tensor | None = None
    draft_lens: torch.Tensor | None = None
    position_offset: int = 0
    penalties: torch.Tensor | None = None
    counts: torch.Tensor | None = None

    def reference(self) -> None:
        next_tokens = self.next_tokens.clamp(min=0)
        if self.draft_token_ids is not None:
            assert self.draft_context_lens is not None and self.draft_lens is not None
            assert self.draft_accepted is not None and self.draft_next_tokens is not None
            self.draft_token_ids.copy_(self.token_ids)
            self.draft_context_lens.copy_((self.lens - 1 + self.position_offset).clamp_(min=0))
            self.draft_accepted.copy_(self.accepted)
            self.draft_next_tokens.copy_(next_tokens)
        self.lens.copy_(torch.minimum(self.lens + self.accepted + 1, self.max_lens))
        self.last_tokens.copy_(next_tokens)
        if self.draft_lens is not None:
            self.draft_lens.copy_((self.max_lens - self.lens - 1).clamp_(0, self.drafts.shape[1]))
        self.outputs[:, 0] = self.accepted
        self.outputs[:, 1:] = torch.nn.functional.pad(self.drafts, (0, 1))
        self.outputs.scatter_(1, 1 + self.accepted[:, None], self.next_tokens[:, None])
        if self.penalties is not None and self.counts is not None:
            tokens = self.outputs[:, 1:]
            is_new = (torch.arange(tokens.shape[1]) <= self.accepted[:, None]) & (tokens >= 0)
            is_new &= is_penalised(self.penalties)[:, None] & (tokens < self.counts.shape[1])
            self.counts.scatter_add_(1, tokens.where(is_new, 0), 2 * is_new.int())

    def launch(self) -> None:
        (rows, num_drafts), draft_ids = self.drafts.shape, self.draft_token_ids
        _update_requests_kernel[(rows,)](
            num_accepted_ptr=self.accepted,
            next_tokens_ptr=self.next_tokens,
            token_ids_ptr=self.token_ids,
            drafts_ptr=self.drafts,
            lens_ptr=self.lens,
            max_lens_ptr=self.max_lens,
            last_tokens_ptr=self.last_tokens,
            outputs_ptr=self.outputs,
            draft_token_ids_ptr=self.draft_token_ids,
            draft_context_lens_ptr=self.draft_context_lens,
            draft_accepted_ptr=self.draft_accepted,
            draft_next_tokens_ptr=self.draft_next_tokens,
            draft_lens_ptr=self.draft_lens,
            penalties_ptr=self.penalties,
            counts_ptr=self.counts,
            position_offset=self.position_offset,
            vocab_size=0 if self.counts is None else self.counts.shape[1],
            num_drafts=num_drafts,
            stride_ids_row=self.token_ids.stride(0),
            stride_ids_col=self.token_ids.stride(1),
            stride_drafts_row=self.drafts.stride(0),
            stride_drafts_col=self.drafts.stride(1),
            stride_outputs=self.outputs.stride(0),
            stride_draft_ids=0 if draft_ids is None else draft_ids.stride(0),
            DRAFTING=draft_ids is not None,
            BLOCK_Q=next_power_of_2(2 + num_drafts),
            num_warps=1,
            **dependent_launch(self.drafts.device),
        )


@triton.jit
def _update_requests_kernel(
    num_accepted_ptr,  # int64 [R]
    next_tokens_ptr,  # int64 [R]
    token_ids_ptr,  # int64 [R, 1 + K]
    drafts_ptr,  # int64 [R, K]
    lens_ptr,  # in and out: int64 [R]
    max_lens_ptr,  # int64 [R]
    last_tokens_ptr,  # out: int64 [R]
    outputs_ptr,  # out: int64 [R, 2 + K]
    draft_token_ids_ptr,  # out: int64 [R, 1 + K]
    draft_context_lens_ptr,  # out: int32 [R]
    draft_accepted_ptr,  # out: int32 [R]
    draft_next_tokens_ptr,  # out: int64 [R]
    draft_lens_ptr,  # out: int32 [R]
    penalties_ptr,  # fp32 [R, 3], or None
    counts_ptr,  # in and out: int32 [R, V]
    position_offset,
    vocab_size,  # V
    num_drafts,  # K
    stride_ids_row,
    stride_ids_col,
    stride_drafts_row,
    stride_drafts_col,
    stride_outputs,
    stride_draft_ids,
    DRAFTING: tl.constexpr,  # whether there is a drafter; if not, the five draft tensors are None
    BLOCK_Q: tl.constexpr,  # 2 + K, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """num_tokens += num_accepted + 1, with the outputs for host and drafter. One program per row."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs_q = tl.arange(0, BLOCK_Q)
    num_accepted = tl.load(num_accepted_ptr + row)
    next_token = tl.load(next_tokens_ptr + row)
    num_tokens = tl.load(lens_ptr + row)
    max_len = tl.load(max_lens_ptr + row)
    # 1. Compute the output for the host
    is_draft = (offs_q > 0) & (offs_q <= num_drafts)
    output = tl.load(drafts_ptr + row * stride_drafts_row + (offs_q - 1) * stride_drafts_col, mask=is_draft, other=0)
    output = tl.where(offs_q == 0, num_accepted, tl.where(offs_q == 1 + num_accepted, next_token, output))
    new_len = tl.minimum(num_tokens + num_accepted + 1, max_len)
    next_token = tl.maximum(next_token, 0)
    if DRAFTING:
        # 2. Store the drafter's next inputs
        in_step = offs_q <= num_drafts
        ids = tl.load(token_ids_ptr + row * stride_ids_row + offs_q * stride_ids_col, mask=in_step)
        tl.store(draft_token_ids_ptr + row * stride_draft_ids + offs_q, ids, mask=in_step)
        tl.store(draft_context_lens_ptr + row, tl.maximum(num_tokens - 1 + position_offset, 0).to(tl.int32))
        tl.store(draft_accepted_ptr + row, num_accepted.to(tl.int32))
        tl.store(draft_next_tokens_ptr + row, next_token)
        tl.store(draft_lens_ptr + row, tl.minimum(tl.maximum(max_len - new_len - 1, 0), num_drafts).to(tl.int32))
    # 3. Store the output and the requests
    tl.store(outputs_ptr + row * stride_outputs + offs_q, output, mask=offs_q < 2 + num_drafts)
    tl.store(last_tokens_ptr + row, next_token)
    tl.store(lens_ptr + row, new_len)
    if penalties_ptr is not None:
        # 4. Count the new tokens
        is_new = (offs_q > 0) & (offs_q <= 1 + num_accepted) & (output >= 0) & (output < vocab_size)
        if has_penalties(penalties_ptr, row):
            tl.atomic_add(counts_ptr + row * vocab_size + output, 2, mask=is_new, sem="relaxed")


update_requests = define_op(
    "spec_decode::update_requests",
    UpdateRequests,
    mutates=(
        "lens",
        "last_tokens",
        "outputs",
        "draft_token_ids",
        "draft_context_lens",
        "draft_accepted",
        "draft_next_tokens",
        "draft_lens",
        "counts",
    ),
)
