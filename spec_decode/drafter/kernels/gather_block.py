"""The hidden states that a block's draft tokens are sampled from."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


class GatherBlock(NamedTuple):
    """hidden [R * K, H]: of row r those at places accepted[r] .. accepted[r] + K - 1, and positions int64 [R * K].

    hidden     [R * Q, H], rows of any stride
    positions  int64 [R * Q]
    accepted   int32 [>= R]   a count outside 0 to Q - K, which only the device could know of, counts as the nearest
    columns    K
    """

    hidden: torch.Tensor
    positions: torch.Tensor
    accepted: torch.Tensor
    query_len: int
    columns: int

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = len(self.hidden) // self.query_len
        first = self.accepted[:rows].clamp(0, self.query_len - self.columns)
        place = torch.arange(rows)[:, None] * self.query_len + first[:, None] + torch.arange(self.columns)
        return self.hidden[place.flatten()], self.positions[place.flatten()]

    def fake(self) -> tuple[torch.Tensor, torch.Tensor]:
        lines = len(self.hidden) // self.query_len * self.columns
        return self.hidden.new_empty(lines, self.hidden.shape[1]), self.positions.new_empty(lines)

    def launch(self) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, positions = self.fake()
        width = hidden.shape[1]
        block = min(1024, triton.next_power_of_2(width))
        _gather_block_kernel[(len(hidden), triton.cdiv(width, block))](
            hidden_ptr=self.hidden,
            positions_ptr=self.positions,
            num_accepted_ptr=self.accepted,
            out_ptr=hidden,
            out_positions_ptr=positions,
            query_len=self.query_len,
            num_drafts=self.columns,
            hidden_size=width,
            stride_hidden=self.hidden.stride(0),
            BLOCK_H=block,
            num_warps=max(1, min(4, block // 256)),
            **dependent_launch(hidden.device),
        )
        return hidden, positions


@triton.jit
def _gather_block_kernel(
    hidden_ptr,  # [R * Q, H]
    positions_ptr,  # int64 [R * Q]
    num_accepted_ptr,  # int32 [>= R]
    out_ptr,  # out: [R * K, H]
    out_positions_ptr,  # out: int64 [R * K]
    query_len,  # Q
    num_drafts,  # K
    hidden_size,  # H
    stride_hidden,  # of a row
    BLOCK_H: tl.constexpr,  # columns of a program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """out[r, k] = hidden[r, num_accepted[r] + k]. Grid [R * K, ceil(H / BLOCK_H)]; the first block has the position."""
    await_previous(PDL)
    out_row = tl.program_id(0).to(tl.int64)
    row = out_row // num_drafts
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = offs_h < hidden_size
    num_accepted = tl.minimum(tl.maximum(tl.load(num_accepted_ptr + row), 0), query_len - num_drafts)
    in_row = row * query_len + num_accepted + out_row % num_drafts
    state = tl.load(hidden_ptr + in_row * stride_hidden + offs_h, mask=mask)
    tl.store(out_ptr + out_row * hidden_size + offs_h, state, mask=mask)
    if tl.program_id(1) == 0:
        tl.store(out_positions_ptr + out_row, tl.load(positions_ptr + in_row))


gather_block = define_op("spec_decode::gather_block", GatherBlock)
