"""The fused advance: one kernel moves the shared state of every KV group one token forward."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.batch import NO_SLOT, BatchBuffers
from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton

_BLOCK = 64


def advance_state(batch: BatchBuffers, num_reqs: int) -> None:
    """Move the first num_reqs single-token rows of `batch` one token forward, in place; graph-safe, one kernel.

    For a live row (seq_lens > 0) below its token limit whose next position has a page in every group:
    seq_lens += 1, positions = seq_lens - 1, slot = page * page_size + offset in each group.
    Any other row gets seq_lens 0 and slot -1, so that it stays inert, and raises tables.overflow if it was live.
    `step` moves by one.
    """
    tables = batch.tables
    _advance_decode(
        batch.seq_lens[:num_reqs],
        batch.positions[:num_reqs],
        batch.slot_mappings[:, :num_reqs],
        batch.step,
        tables.overflow,
        tables.block_tables,
        tables.page_sizes,
        tables.token_limits,
    )


class AdvanceDecode(NamedTuple):
    """seq_lens int32 [R], positions int64 [R], slot_mappings int64 [G, R], step int64 [1]; the others as RequestTables
    has them, of at least R rows."""

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
        block = min(_BLOCK, triton.next_power_of_2(num_reqs))
        _advance_kernel[(triton.cdiv(num_reqs, block),)](
            *self,
            num_reqs,
            max_pages,
            self.slot_mappings.stride(0),
            *self.block_tables.stride()[:2],
            GROUPS=groups,
            BLOCK_G=triton.next_power_of_2(groups),
            BLOCK=block,
            num_warps=1,
            **dependent_launch(self.seq_lens.device),
        )


@triton.jit
def _advance_kernel(
    seq_lens,  # in and out: int32 [R]
    positions,  # out: int64 [R]
    slot_mappings,  # out: int64 [G, R]
    step,  # in and out: int64 [1]
    overflow,  # out: int32 [>= R]
    block_tables,  # int32 [G, >= R, max_pages]
    page_sizes,  # int32 [G]
    token_limits,  # int32 [>= R]
    num_reqs,  # R
    max_pages,
    slots_stride,  # of a group, as is the next
    table_stride,
    row_stride,
    GROUPS: tl.constexpr,  # G
    BLOCK_G: tl.constexpr,  # G, rounded up to a power of two
    BLOCK: tl.constexpr,  # rows of a program
    PDL: tl.constexpr,
):
    """One program per BLOCK rows, all groups of them."""
    await_previous(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.arange(0, BLOCK_G)
    inside = row < num_reqs
    in_group = group < GROUPS
    position = tl.load(seq_lens + row, mask=inside, other=0)
    limit = tl.load(token_limits + row, mask=inside, other=0)
    size = tl.load(page_sizes + group, mask=in_group, other=1)
    live = position > 0
    wants = live & (position < limit)
    # Which rows move: those whose next position has a page in every group
    column = position[None, :] // size[:, None]
    asked = in_group[:, None] & wants[None, :] & (column < max_pages)
    entry = block_tables + group[:, None] * table_stride + row[None, :].to(tl.int64) * row_stride + column
    page = tl.load(entry, mask=asked, other=-1)
    moves = wants & (tl.min(tl.where(in_group[:, None], page, 0), 0) >= 0)
    # Their new state, inert for the others
    slot = page.to(tl.int64) * size[:, None] + position[None, :] % size[:, None]
    tl.store(
        slot_mappings + group[:, None] * slots_stride + row[None, :],
        tl.where(moves[None, :], slot, -1),
        mask=in_group[:, None] & inside[None, :],
    )
    tl.store(positions + row, position.to(tl.int64), mask=moves)
    tl.store(seq_lens + row, tl.where(moves, position + 1, 0), mask=inside)
    tl.store(overflow + row, 1, mask=live & (moves == 0))
    if tl.program_id(0) == 0:
        tl.store(step, tl.load(step) + 1)


_advance_decode = define_op(
    "builders::advance_decode", AdvanceDecode, mutates=("seq_lens", "positions", "slot_mappings", "step", "overflow")
)
