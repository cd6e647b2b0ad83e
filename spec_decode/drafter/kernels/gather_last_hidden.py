"""The hidden states that the later steps start from: of each request, that of its last accepted token."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


class GatherLastHidden(NamedTuple):
    """last[r] = hidden[r * query_len + accepted[r]], in place, after a uniform batch of query_len tokens a row.

    hidden     [R * query_len, H]
    accepted   int32 [>= R]   a count outside 0 to query_len - 1, which only the device could know of, counts as the
                              nearest of these
    last       [R, H]         contiguous, in a dtype of its own
    """

    hidden: torch.Tensor
    accepted: torch.Tensor
    last: torch.Tensor
    query_len: int

    def reference(self) -> None:
        rows = self.last.shape[0]
        place = self.accepted[:rows].clamp(0, self.query_len - 1)
        self.last.copy_(self.hidden[torch.arange(rows) * self.query_len + place])

    def launch(self) -> None:
        rows, width = self.last.shape
        block = min(1024, triton.next_power_of_2(width))
        _gather_last_hidden_kernel[(rows, triton.cdiv(width, block))](
            hidden_ptr=self.hidden,
            num_accepted_ptr=self.accepted,
            out_ptr=self.last,
            query_len=self.query_len,
            hidden_size=width,
            stride_hidden_row=self.hidden.stride(0),
            stride_hidden_col=self.hidden.stride(1),
            BLOCK_H=block,
            num_warps=max(1, min(4, block // 256)),
            **dependent_launch(self.hidden.device),
        )


@triton.jit
def _gather_last_hidden_kernel(
    hidden_ptr,  # [R * query_len, H]
    num_accepted_ptr,  # int32 [>= R]
    out_ptr,  # out: [R, H]
    query_len,
    hidden_size,  # H
    stride_hidden_row,
    stride_hidden_col,
    BLOCK_H: tl.constexpr,  # columns of a program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """out[r] = hidden[r, num_accepted[r]]. Grid [R, ceil(H / BLOCK_H)]."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = offs_h < hidden_size
    num_accepted = tl.minimum(tl.maximum(tl.load(num_accepted_ptr + row), 0), query_len - 1)
    row_ptr = hidden_ptr + (row * query_len + num_accepted) * stride_hidden_row
    state = tl.load(row_ptr + offs_h * stride_hidden_col, mask=mask)
    tl.store(out_ptr + row * hidden_size + offs_h, state, mask=mask)


gather_last_hidden = define_op("spec_decode::gather_last_hidden", GatherLastHidden, mutates=("last",))
