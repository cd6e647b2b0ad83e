"""Gather the hidden states that a draft continues from: each request's, starting at its last accepted token."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


class GatherAccepted(NamedTuple):
    """out[r * columns + k] = hidden[r * query_len + accepted[r] + k], in place, for a uniform batch of query_len tokens
    a row; the same for positions, unless None.

    hidden         [R * query_len, H]
    accepted       int32 [>= R]   clamped to [0, query_len - columns] on the device, since the host cannot check it
    out            [R * columns, H]   contiguous, any dtype
    positions      int64 [R * query_len], or None
    out_positions  int64 [R * columns], or None
    """

    hidden: torch.Tensor
    accepted: torch.Tensor
    out: torch.Tensor
    query_len: int
    columns: int = 1
    positions: torch.Tensor | None = None
    out_positions: torch.Tensor | None = None

    def reference(self) -> None:
        rows = len(self.out) // self.columns
        first = self.accepted[:rows].clamp(0, self.query_len - self.columns)
        place = torch.arange(rows) * self.query_len + first
        taken = (place[:, None] + torch.arange(self.columns)).flatten()
        self.out.copy_(self.hidden[taken])
        if self.positions is not None and self.out_positions is not None:
            self.out_positions.copy_(self.positions[taken])

    def launch(self) -> None:
        lines, width = self.out.shape
        block = min(1024, next_power_of_2(width))
        _gather_accepted_kernel[(lines, cdiv(width, block))](
            hidden_ptr=self.hidden,
            num_accepted_ptr=self.accepted,
            out_ptr=self.out,
            positions_ptr=self.positions,
            out_positions_ptr=self.out_positions,
            query_len=self.query_len,
            num_columns=self.columns,
            hidden_size=width,
            stride_hidden_row=self.hidden.stride(0),
            stride_hidden_col=self.hidden.stride(1),
            BLOCK_H=block,
            num_warps=max(1, min(4, block // 256)),
            **dependent_launch(self.hidden.device),
        )


@triton.jit
def _gather_accepted_kernel(
    hidden_ptr,  # [R * query_len, H]
    num_accepted_ptr,  # int32 [>= R]
    out_ptr,  # out: [R * columns, H]
    positions_ptr,  # int64 [R * query_len], or None
    out_positions_ptr,  # out: int64 [R * columns], or None
    query_len,
    num_columns,
    hidden_size,  # H
    stride_hidden_row,
    stride_hidden_col,
    BLOCK_H: tl.constexpr,  # columns of H per program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """out[r, k] = hidden[r, num_accepted[r] + k]. Grid [R * columns, ceil(H / BLOCK_H)]; the first block writes the
    position."""
    await_previous(PDL)
    out_row = tl.program_id(0).to(tl.int64)
    row = out_row // num_columns
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = offs_h < hidden_size
    num_accepted = tl.minimum(tl.maximum(tl.load(num_accepted_ptr + row), 0), query_len - num_columns)
    in_row = row * query_len + num_accepted + out_row % num_columns
    state = tl.load(hidden_ptr + in_row * stride_hidden_row + offs_h * stride_hidden_col, mask=mask)
    tl.store(out_ptr + out_row * hidden_size + offs_h, state, mask=mask)
    if positions_ptr is not None:
        tl.store(out_positions_ptr + out_row, tl.load(positions_ptr + in_row), mask=tl.program_id(1) == 0)


gather_accepted = define_op("spec_decode::gather_accepted", GatherAccepted, mutates=("out", "out_positions"))
