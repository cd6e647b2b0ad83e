"""The cache slots that each query token sees through a sliding window, listed by one kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.batch import NO_SLOT
from builders.kernels.op import define_op
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


class ListWindowSlots(NamedTuple):
    """List, for every query token, the slots of the last `window` tokens up to its own, in position order.

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
            window_indices_ptr=self.window_indices,
            window_lens_ptr=self.window_lens,
            positions_ptr=self.positions,
            seq_lens_ptr=self.seq_lens,
            query_start_loc_ptr=self.query_start_loc,
            block_table_ptr=self.block_table,
            num_reqs=num_reqs,
            max_len=self._capacity,
            stride_block_table=self.block_table.stride(0),
            WINDOW=self.window,
            PAGE_SIZE=self.page_size,
            WIDTH=width,
            BLOCK_W=next_power_of_2(width),
            BLOCK_R=next_power_of_2(num_reqs),
            num_warps=1 if width <= 256 else 4,
            **dependent_launch(self.positions.device),
        )


@triton.jit
def _list_window_slots_kernel(
    window_indices_ptr,  # out: int32 [T, W]
    window_lens_ptr,  # out: int32 [T]
    positions_ptr,  # int64 [T]
    seq_lens_ptr,  # int32 [R]
    query_start_loc_ptr,  # int32 [R + 1]
    block_table_ptr,  # int32 [R, max_pages]
    num_reqs,  # R
    max_len,  # max_pages * PAGE_SIZE
    stride_block_table,
    WINDOW: tl.constexpr,  # tokens that a query sees, itself included
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # W
    BLOCK_W: tl.constexpr,  # W, rounded up to a power of two
    BLOCK_R: tl.constexpr,  # R, likewise
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """window_indices[token] = the slots of positions p - WINDOW + 1 to p. One program per query token."""
    INT32_MAX: tl.constexpr = 2**31 - 1
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    # 1. The token's request, and whether it has a window at all
    offs_r = tl.arange(0, BLOCK_R)
    ends = tl.load(query_start_loc_ptr + 1 + offs_r, mask=offs_r < num_reqs, other=INT32_MAX)
    row = tl.sum((ends <= token).to(tl.int32), 0)
    live = tl.load(seq_lens_ptr + row, mask=row < num_reqs, other=0) > 0
    position_int64 = tl.load(positions_ptr + token)
    live = live & (position_int64 >= 0) & (position_int64 < max_len)
    # 2. The slots of its window
    position = position_int64.to(tl.int32)
    kv_start = tl.maximum(position - WINDOW + 1, 0)
    window_len = tl.where(live, position + 1 - kv_start, 0)
    offs_w = tl.arange(0, BLOCK_W)
    mask_w = offs_w < window_len
    kv_pos = kv_start + offs_w
    page = tl.load(block_table_ptr + row.to(tl.int64) * stride_block_table + kv_pos // PAGE_SIZE, mask=mask_w, other=0)
    slots = tl.where(mask_w, page * PAGE_SIZE + kv_pos % PAGE_SIZE, -1)
    tl.store(window_indices_ptr + token * WIDTH + offs_w, slots, mask=offs_w < WIDTH)
    tl.store(window_lens_ptr + token, window_len)


list_window_slots = define_op("builders::list_window_slots", ListWindowSlots, mutates=("window_indices", "window_lens"))
