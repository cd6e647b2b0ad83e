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
            *self[:3],
            hidden,
            positions,
            self.query_len,
            self.columns,
            width,
            self.hidden.stride(0),
            BLOCK=block,
            num_warps=max(1, min(4, block // 256)),
            **dependent_launch(hidden.device),
        )
        return hidden, positions


@triton.jit
def _gather_block_kernel(
    hidden,  # [R * Q, H]
    positions,  # int64 [R * Q]
    accepted,  # int32 [>= R]
    out,  # [R * K, H]
    out_positions,  # int64 [R * K]
    query_len,  # Q
    columns,  # K
    width,  # H
    row_stride,  # of hidden
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row of `out` and block of columns; the first block also writes the position."""
    await_previous(PDL)
    line = tl.program_id(0).to(tl.int64)
    row = line // columns
    dim = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dim < width
    first = tl.minimum(tl.maximum(tl.load(accepted + row), 0), query_len - columns)
    place = row * query_len + first + line % columns
    tl.store(out + line * width + dim, tl.load(hidden + place * row_stride + dim, mask=inside), mask=inside)
    if tl.program_id(1) == 0:
        tl.store(out_positions + line, tl.load(positions + place))


gather_block = define_op("spec_decode::gather_block", GatherBlock)
