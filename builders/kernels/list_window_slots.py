"""The cache slots that each query token sees through a sliding window, listed by one kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.batch import NO_SLOT
from builders.kernels.limits import INT32_MAX
from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


class ListWindowSlots(NamedTuple):
    """List, for every query token, the slots of the last `window` tokens up to its own, in the order of positions.

    window_indices   int32 [T, W] contiguous     slots page * page_size + offset, then -1
    window_lens      int32 [T]                   slots listed; 0 for the tokens of inert rows, after the last row and
                                                 beyond the block table
    positions        int64 [T]
    seq_lens         int32 [R]
    query_start_loc  int32 [R + 1]
    block_table      int32 [R, max_pages]        read only inside the windows of live rows
    """

    window_indices: torch.Tensor
    window_lens: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    block_table: torch.Tensor
    window: int
    page_size: int

    @property
    def _capacity(self) -> int:
        return self.block_table.shape[1] * self.page_size

    def reference(self) -> None:
        tokens, width = self.window_indices.shape
        starts = self.query_start_loc
        token = torch.arange(tokens, dtype=starts.dtype)
        row = torch.searchsorted(starts[1:], token, right=True).clamp_(max=self.seq_lens.shape[0] - 1)
        in_table = (self.positions >= 0) & (self.positions < self._capacity)
        live = (self.seq_lens[row] > 0) & (token < starts[-1]) & in_table
        first = (self.positions - self.window + 1).clamp_(min=0)
        lens = torch.where(live, self.positions + 1 - first, 0)
        lane = torch.arange(width)
        seen = lane < lens[:, None]
        position = torch.where(seen, first[:, None] + lane, 0)
        page = self.block_table[row[:, None], position // self.page_size]
        self.window_indices.copy_(torch.where(seen, page * self.page_size + position % self.page_size, NO_SLOT))
        self.window_lens.copy_(lens)

    def launch(self) -> None:
        (tokens, width), num_reqs = self.window_indices.shape, self.seq_lens.shape[0]
        _list_window_slots_kernel[(tokens,)](
            *self[:6],
            num_reqs,
            self._capacity,
            self.block_table.stride(0),
            WINDOW=self.window,
            PAGE_SIZE=self.page_size,
            WIDTH=width,
            BLOCK_W=triton.next_power_of_2(width),
            BLOCK_R=triton.next_power_of_2(num_reqs),
            num_warps=1 if width <= 256 else 4,
            **dependent_launch(self.positions.device),
        )


@triton.jit
def _list_window_slots_kernel(
    window_indices,  # out: int32 [T, W]
    window_lens,  # out: int32 [T]
    positions,  # int64 [T]
    seq_lens,  # int32 [R]
    query_start_loc,  # int32 [R + 1]
    block_table,  # int32 [R, max_pages]
    num_reqs,  # R
    capacity,  # max_pages * PAGE_SIZE
    table_stride,
    WINDOW: tl.constexpr,  # tokens that a query sees, itself included
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # W
    BLOCK_W: tl.constexpr,  # W, rounded up to a power of two
    BLOCK_R: tl.constexpr,  # R, likewise
    PDL: tl.constexpr,
):
    """One program per query token."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    # The token's request, and whether it has a window at all
    request = tl.arange(0, BLOCK_R)
    ends = tl.load(query_start_loc + 1 + request, mask=request < num_reqs, other=INT32_MAX)
    row = tl.sum((ends <= token).to(tl.int32), 0)
    live = tl.load(seq_lens + row, mask=row < num_reqs, other=0) > 0
    wide = tl.load(positions + token)
    live = live & (wide >= 0) & (wide < capacity)
    # The slots of its window
    position = wide.to(tl.int32)
    first = tl.maximum(position - WINDOW + 1, 0)
    length = tl.where(live, position + 1 - first, 0)
    lane = tl.arange(0, BLOCK_W)
    seen = lane < length
    at = first + lane
    page = tl.load(block_table + row.to(tl.int64) * table_stride + at // PAGE_SIZE, mask=seen, other=0)
    slots = tl.where(seen, page * PAGE_SIZE + at % PAGE_SIZE, -1)
    tl.store(window_indices + token * WIDTH + lane, slots, mask=lane < WIDTH)
    tl.store(window_lens + token, length)


list_window_slots = define_op("builders::list_window_slots", ListWindowSlots, mutates=("window_indices", "window_lens"))
