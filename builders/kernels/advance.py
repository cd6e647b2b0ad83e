"""The fused advance: one kernel moves the shared state of every KV group forward by one token."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.batch import NO_SLOT, BatchBuffers
from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton

_BLOCK = 64


def advance_state(batch: BatchBuffers, num_reqs: int) -> None:
    """Move the first num_reqs single-token rows of `batch` forward by one token, in place; graph-safe, one kernel.

    For a live row (seq_lens > 0) below its token limit whose next position has a page in every group:
    seq_lens += 1, positions = seq_lens - 1, slot = page * page_size + offset in each group.
    Any other row becomes inert, with seq_lens 0 and slot -1, and sets tables.overflow if it was live.
    `step` is incremented. Raises BatchError, and moves nothing, for more rows than the buffers hold.
    """
    batch.require_room(num_reqs, num_reqs)
    tables = batch.tables
    arguments = AdvanceDecode(
        seq_lens=batch.seq_lens[:num_reqs],
        positions=batch.positions[:num_reqs],
        slot_mappings=batch.slot_mappings[:, :num_reqs],
        step=batch.step,
        overflow=tables.overflow,
        block_tables=tables.block_tables,
        page_sizes=tables.page_sizes,
        token_limits=tables.token_limits,
    )
    _advance_decode(*arguments)


class AdvanceDecode(NamedTuple):
    """seq_lens int32 [R], positions int64 [R], slot_mappings int64 [G, R], step int64 [1]; the others as in
    RequestTables, with at least R rows."""

    seq_lens: torch.Tensor
    positions: torch.Tensor
    slot_mappings: torch.Tensor
    step: torch.Tensor
    overflow: torch.Tensor
    block_tables: torch.Tensor
    page_sizes: torch.Tensor
    token_limits: torch.Tensor

    def reference(self) -> None:
        num_reqs = self.seq_lens.shape[0]
        live = self.seq_lens > 0
        position = self.seq_lens.long()
        sizes = self.page_sizes.long()[:, None]
        column = position[None] // sizes
        in_table = column < self.block_tables.shape[2]
        page = self.block_tables[:, :num_reqs].long().gather(2, (column * in_table)[..., None])[..., 0]
        moves = live & (self.seq_lens < self.token_limits[:num_reqs]) & (in_table & (page >= 0)).all(0)
        self.slot_mappings.copy_(torch.where(moves, page * sizes + position % sizes, NO_SLOT))
        self.positions.copy_(torch.where(moves, position, self.positions))
        self.seq_lens.copy_(torch.where(moves, self.seq_lens + 1, 0))
        self.overflow[:num_reqs] |= (live & ~moves).int()
        self.step.add_(1)

    def launch(self) -> None:
        num_reqs, (groups, _, max_pages) = self.seq_lens.shape[0], self.block_tables.shape
        block = min(_BLOCK, next_power_of_2(num_reqs))
        _advance_kernel[(cdiv(num_reqs, block),)](
            seq_lens_ptr=self.seq_lens,
            positions_ptr=self.positions,
            slot_mappings_ptr=self.slot_mappings,
            step_ptr=self.step,
            overflow_ptr=self.overflow,
            block_tables_ptr=self.block_tables,
            page_sizes_ptr=self.page_sizes,
            token_limits_ptr=self.token_limits,
            num_reqs=num_reqs,
            max_pages=max_pages,
            stride_slot_group=self.slot_mappings.stride(0),
            stride_table_group=self.block_tables.stride(0),
            stride_table_row=self.block_tables.stride(1),
            GROUPS=groups,
            BLOCK_G=next_power_of_2(groups),
            BLOCK_R=block,
            num_warps=1,
            **dependent_launch(self.seq_lens.device),
        )


@triton.jit
def _advance_kernel(
    seq_lens_ptr,  # in and out: int32 [R]
    positions_ptr,  # out: int64 [R]
    slot_mappings_ptr,  # out: int64 [G, R]
    step_ptr,  # in and out: int64 [1]
    overflow_ptr,  # out: int32 [>= R]
    block_tables_ptr,  # int32 [G, >= R, max_pages]
    page_sizes_ptr,  # int32 [G]
    token_limits_ptr,  # int32 [>= R]
    num_reqs,  # R
    max_pages,
    stride_slot_group,
    stride_table_group,
    stride_table_row,
    GROUPS: tl.constexpr,  # G
    BLOCK_G: tl.constexpr,  # G, rounded up to a power of two
    BLOCK_R: tl.constexpr,  # rows per program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """seq_len += 1, position = seq_len - 1, slot = page * page_size + offset. One program per BLOCK_R rows."""
    await_previous(PDL)
    offs_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_g = tl.arange(0, BLOCK_G)
    mask_r = offs_r < num_reqs
    mask_g = offs_g < GROUPS
    position = tl.load(seq_lens_ptr + offs_r, mask=mask_r, other=0)
    limit = tl.load(token_limits_ptr + offs_r, mask=mask_r, other=0)
    page_size = tl.load(page_sizes_ptr + offs_g, mask=mask_g, other=1)
    live = position > 0
    wants = live & (position < limit)
    # 1. Which rows move: those whose next position has a page in every group
    page_column = position[None, :] // page_size[:, None]
    mask = mask_g[:, None] & wants[None, :] & (page_column < max_pages)
    table_ptrs = block_tables_ptr + offs_g[:, None] * stride_table_group
    table_ptrs += offs_r[None, :].to(tl.int64) * stride_table_row
    page = tl.load(table_ptrs + page_column, mask=mask, other=-1)
    moves = wants & (tl.min(tl.where(mask_g[:, None], page, 0), 0) >= 0)
    # 2. Their new state; the others become inert
    slot = page.to(tl.int64) * page_size[:, None] + position[None, :] % page_size[:, None]
    tl.store(
        slot_mappings_ptr + offs_g[:, None] * stride_slot_group + offs_r[None, :],
        tl.where(moves[None, :], slot, -1),
        mask=mask_g[:, None] & mask_r[None, :],
    )
    tl.store(positions_ptr + offs_r, position.to(tl.int64), mask=moves)
    tl.store(seq_lens_ptr + offs_r, tl.where(moves, position + 1, 0), mask=mask_r)
    tl.store(overflow_ptr + offs_r, 1, mask=live & (moves == 0))
    if tl.program_id(0) == 0:
        tl.store(step_ptr, tl.load(step_ptr) + 1)


_advance_decode = define_op(
    "builders::advance_decode", AdvanceDecode, mutates=("seq_lens", "positions", "slot_mappings", "step", "overflow")
)
