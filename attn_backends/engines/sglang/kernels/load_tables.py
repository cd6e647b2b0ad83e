"""Gather a batch's rows from an engine's table of all requests, in one kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


class LoadTables(NamedTuple):
    """seq_lens[r] = context_lens[r] + 1, and block_table[r] = the pages of slots[requests[r]] that the steps reach.

    slots         int32 [requests, >= max_pages * page_size]   cache slot of each token, with any row stride
    requests      int64 [R]                 rows of `slots`; clamped to its range
    context_lens  int64 or int32 [R]        tokens in the cache
    seq_lens      int32 [>= R]
    block_table   int32 [>= R, max_pages]   entries beyond a row's length and steps are unchanged
    page_size     slots per page; a page's tokens have adjacent slots, the first a multiple of page_size
    steps         steps to come; each sees one more token
    """

    slots: torch.Tensor
    requests: torch.Tensor
    context_lens: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    page_size: int
    steps: int

    def reference(self) -> None:
        rows, pages = len(self.requests), self.block_table.shape[1]
        self.seq_lens[:rows] = self.context_lens + 1
        first = torch.arange(pages) * self.page_size
        found = self.slots[self.requests.clamp(0, len(self.slots) - 1)][:, first] // self.page_size
        reached = first < (self.context_lens + self.steps)[:, None]
        self.block_table[:rows] = torch.where(reached, found, self.block_table[:rows])

    def launch(self) -> None:
        rows, block = len(self.requests), 1024
        _load_tables_kernel[(rows,)](
            slots_ptr=self.slots,
            requests_ptr=self.requests,
            context_lens_ptr=self.context_lens,
            seq_lens_ptr=self.seq_lens,
            block_table_ptr=self.block_table,
            page_size=self.page_size,
            steps=self.steps,
            num_requests=len(self.slots),
            stride_slots=self.slots.stride(0),
            max_pages=self.block_table.shape[1],
            stride_block_table=self.block_table.stride(0),
            BLOCK_P=block,
            num_warps=4,
            **dependent_launch(self.slots.device),
        )


@triton.jit
def _load_tables_kernel(
    slots_ptr,  # int32 [requests, >= max_pages * page_size]
    requests_ptr,  # int64 [R]
    context_lens_ptr,  # int64 or int32 [R]
    seq_lens_ptr,  # out: int32 [>= R]
    block_table_ptr,  # out: int32 [>= R, max_pages]
    page_size,
    steps,
    num_requests,  # rows of slots
    stride_slots,
    max_pages,
    stride_block_table,
    BLOCK_P: tl.constexpr,  # pages copied per iteration
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """block_table[p] = slots[request, p * page_size] // page_size. One program per row of the batch."""
    await_previous(PDL)
    row = tl.program_id(0)
    request = tl.minimum(tl.maximum(tl.load(requests_ptr + row), 0), num_requests - 1).to(tl.int64)
    context_len = tl.load(context_lens_ptr + row).to(tl.int32)
    tl.store(seq_lens_ptr + row, context_len + 1)
    num_pages = tl.minimum((context_len + steps + page_size - 1) // page_size, max_pages)
    for start in range(0, num_pages, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        mask = offs_p < num_pages
        slot = tl.load(slots_ptr + request * stride_slots + offs_p.to(tl.int64) * page_size, mask=mask, other=0)
        tl.store(block_table_ptr + row.to(tl.int64) * stride_block_table + offs_p, slot // page_size, mask=mask)


load_tables = define_op("attn_backends::load_tables", LoadTables, mutates=("seq_lens", "block_table"))
