"""What verification changes: the requests, the output for the host, and where the drafter's next round starts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.errors import require_tensor
from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


class RequestTensors(NamedTuple):
    """R requests; all but max_lens are written in place.

    lens         int64 [R]          tokens of prompt and output
    max_lens     int64 [R]          where the output ends
    last_tokens  int64 [R]
    outputs      int64 [R, 2 + K]   of this step: the number of draft tokens kept, these tokens, and the target's own
    """

    lens: torch.Tensor
    max_lens: torch.Tensor
    last_tokens: torch.Tensor
    outputs: torch.Tensor


class DraftInputs(NamedTuple):
    """What the drafter reads of a target step, R rows, written in place.

    token_ids     int64 [R, 1 + K]   those of the step
    context_lens  int32 [R]          draft KV tokens before them
    accepted      int32 [R]          draft tokens kept
    next_tokens   int64 [R]          the target's own after them
    draft_lens    int32 [R]          draft tokens wanted: the request's last token is always the target's own
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
    requests: RequestTensors,
    draft_inputs: DraftInputs | None,
    *,
    position_offset: int = 0,
) -> None:
    """Lengthen each request by its `accepted` draft tokens and its next token, up to its end; in place.

    accepted         int64 [R]
    next_tokens      int64 [R]
    token_ids        int64 [R, 1 + K]   those of the step
    drafts           int64 [R, K]       of these, what was proposed; -1 from its end on
    draft_inputs     None without a drafter
    position_offset  the draft's position of a request's first token

    Raises BatchError, with nothing written, for tensors of another shape, dtype or device.
    """
    rows, num_drafts = drafts.shape
    flat, step, wide = (rows,), (rows, 1 + num_drafts), (rows, 2 + num_drafts)
    given = (accepted.contiguous(), next_tokens.contiguous(), token_ids, drafts, *requests)
    shapes = (flat, flat, step, (rows, num_drafts), flat, flat, flat, wide)
    names = ("accepted", "next_tokens", "token_ids", "drafts", *RequestTensors._fields)
    for name, tensor, shape in zip(names, given, shapes, strict=True):
        require_tensor(name, tensor, shape=shape, dtype=torch.int64, device=drafts.device)
    if draft_inputs is not None:
        dtypes = (torch.int64, torch.int32, torch.int32, torch.int64, torch.int32)
        for name, tensor, dtype in zip(DraftInputs._fields, draft_inputs, dtypes, strict=True):
            shape = step if name == "token_ids" else flat
            require_tensor(name, tensor, shape=shape, dtype=dtype, device=drafts.device)
    _update_requests(*given, *(draft_inputs or (None,) * 5), position_offset)


class UpdateRequests(NamedTuple):
    """The arguments of `update_requests`, RequestTensors and DraftInputs field by field."""

    accepted: torch.Tensor
    next_tokens: torch.Tensor
    token_ids: torch.Tensor
    drafts: torch.Tensor
    lens: torch.Tensor
    max_lens: torch.Tensor
    last_tokens: torch.Tensor
    outputs: torch.Tensor
    draft_token_ids: torch.Tensor | None
    draft_context_lens: torch.Tensor | None
    draft_accepted: torch.Tensor | None
    draft_next_tokens: torch.Tensor | None
    draft_lens: torch.Tensor | None
    position_offset: int

    def reference(self) -> None:
        if self.draft_token_ids is not None:
            assert self.draft_context_lens is not None and self.draft_lens is not None
            assert self.draft_accepted is not None and self.draft_next_tokens is not None
            self.draft_token_ids.copy_(self.token_ids)
            self.draft_context_lens.copy_((self.lens - 1 + self.position_offset).clamp_(min=0))
            self.draft_accepted.copy_(self.accepted)
            self.draft_next_tokens.copy_(self.next_tokens)
        self.lens.copy_(torch.minimum(self.lens + self.accepted + 1, self.max_lens))
        self.last_tokens.copy_(self.next_tokens)
        if self.draft_lens is not None:
            self.draft_lens.copy_((self.max_lens - self.lens - 1).clamp_(0, self.drafts.shape[1]))
        self.outputs[:, 0] = self.accepted
        self.outputs[:, 1:] = torch.nn.functional.pad(self.drafts, (0, 1))
        self.outputs.scatter_(1, 1 + self.accepted[:, None], self.next_tokens[:, None])

    def launch(self) -> None:
        (rows, num_drafts), draft_ids = self.drafts.shape, self.draft_token_ids
        _update_requests_kernel[(rows,)](
            *self, num_drafts, *self.token_ids.stride(), *self.drafts.stride(), self.outputs.stride(0),
            0 if draft_ids is None else draft_ids.stride(0), DRAFTING=draft_ids is not None,
            BLOCK=triton.next_power_of_2(2 + num_drafts), num_warps=1, **dependent_launch(self.drafts.device),
        )  # fmt: skip


@triton.jit
def _update_requests_kernel(
    accepted, next_tokens, token_ids, drafts, lens, max_lens, last_tokens, outputs,
    draft_token_ids, draft_context_lens, draft_accepted, draft_next_tokens, draft_lens, position_offset, num_drafts,
    ids_row_stride, ids_column_stride, drafts_row_stride, drafts_column_stride, outputs_stride, draft_ids_stride,
    DRAFTING: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    kept = tl.load(accepted + row)
    next_token = tl.load(next_tokens + row)
    length = tl.load(lens + row)
    limit = tl.load(max_lens + row)
    drafted = (column > 0) & (column <= num_drafts)
    output = tl.load(drafts + row * drafts_row_stride + (column - 1) * drafts_column_stride, mask=drafted, other=0)
    output = tl.where(column == 0, kept, tl.where(column == 1 + kept, next_token, output))
    grown = tl.minimum(length + kept + 1, limit)
    if DRAFTING:
        in_step = column <= num_drafts
        ids = tl.load(token_ids + row * ids_row_stride + column * ids_column_stride, mask=in_step)
        tl.store(draft_token_ids + row * draft_ids_stride + column, ids, mask=in_step)
        tl.store(draft_context_lens + row, tl.maximum(length - 1 + position_offset, 0).to(tl.int32))
        tl.store(draft_accepted + row, kept.to(tl.int32))
        tl.store(draft_next_tokens + row, next_token)
        tl.store(draft_lens + row, tl.minimum(tl.maximum(limit - grown - 1, 0), num_drafts).to(tl.int32))
    tl.store(outputs + row * outputs_stride + column, output, mask=column < 2 + num_drafts)
    tl.store(last_tokens + row, next_token)
    tl.store(lens + row, grown)


_update_requests = define_op(
    "spec_decode::update_requests",
    UpdateRequests,
    mutates=(
        "lens", "last_tokens", "outputs",
        "draft_token_ids", "draft_context_lens", "draft_accepted", "draft_next_tokens", "draft_lens",
    ),
)  # fmt: skip
