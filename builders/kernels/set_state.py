"""The shared state at the two points of a round where it is set, not advanced: before step 0 and before step 1."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.batch import NO_SLOT, BatchBuffers
from builders.errors import BatchError
from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


def set_extend_state(batch: BatchBuffers, context_lens: torch.Tensor, num_reqs: int, query_len: int) -> None:
    """Set a uniform batch of query_len tokens per row, after the context_lens[r] KV tokens of row r. One kernel.

    context_lens   int32 [num_reqs]   tokens in the cache; must not lie before the first position that the row can
                                      write, which the host cannot check

    A row with token limit 0 is padding. A live row sets tables.overflow if its context is negative, its tokens do not
    all fit under its limit, or one lacks a page in some group. Both become inert: seq_lens 0, positions 0, slots -1.

    Raises BatchError, and sets nothing, for more rows or tokens than the buffers hold, and for fewer context_lens.
    """
    tables = batch.tables
    num_tokens = num_reqs * query_len
    batch.require_room(num_reqs, num_tokens)
    _require_rows("context_lens", context_lens, num_reqs)
    arguments = SetExtendState(
        seq_lens=batch.seq_lens[:num_reqs],
        positions=batch.positions[:num_tokens],
        slot_mappings=batch.slot_mappings[:, :num_tokens],
        overflow=tables.overflow,
        context_lens=context_lens,
        block_tables=tables.block_tables,
        page_sizes=tables.page_sizes,
        token_limits=tables.token_limits,
        query_len=query_len,
    )
    _set_extend_state(*arguments)


def set_decode_state(
    batch: BatchBuffers, extend_seq_lens: torch.Tensor, accepted: torch.Tensor, num_reqs: int, query_len: int
) -> None:
    """Set the state that the first advance starts from, after a uniform batch of query_len tokens per row. One kernel.

    extend_seq_lens   int32 [num_reqs]   seq_lens of that batch; a row with 0 stays inert
    accepted          int32 [num_reqs]   row r keeps its first accepted[r] + 1 query tokens; a count outside 0 to
                                         query_len - 1 is clamped, since the host cannot check it

    seq_lens becomes extend_seq_lens - query_len + accepted + 1, step becomes 0 and slots -1: nothing is written yet.

    Raises BatchError, and sets nothing, for more rows than the buffers or the two tensors hold.
    """
    batch.require_room(num_reqs, num_reqs)
    _require_rows("extend_seq_lens", extend_seq_lens, num_reqs)
    _require_rows("accepted", accepted, num_reqs)
    arguments = SetDecodeState(
        seq_lens=batch.seq_lens[:num_reqs],
        positions=batch.positions[:num_reqs],
        slot_mappings=batch.slot_mappings[:, :num_reqs],
        step=batch.step,
        extend_seq_lens=extend_seq_lens,
        accepted=accepted,
        query_len=query_len,
    )
    _set_decode_state(*arguments)


def _require_rows(name: str, rows: torch.Tensor, num_reqs: int) -> None:
    if rows.shape[0] < num_reqs or rows.dtype != torch.int32 or not rows.is_contiguous():
        raise BatchError(
            f"{name} must be contiguous torch.int32 of at least {num_reqs} rows, got {rows.dtype} {list(rows.shape)} "
            f"with strides {rows.stride()}; a kernel would misread it. Copy it with .int().contiguous()."
        )


class SetExtendState(NamedTuple):
    """seq_lens int32 [R], positions int64 [R * query_len], slot_mappings int64 [G, R * query_len], context_lens int32
    with at least R rows; the others as in RequestTables, with at least R rows."""

    seq_lens: torch.Tensor
    positions: torch.Tensor
    slot_mappings: torch.Tensor
    overflow: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    page_sizes: torch.Tensor
    token_limits: torch.Tensor
    query_len: int

    def reference(self) -> None:
        num_reqs = self.seq_lens.shape[0]
        limits = self.token_limits[:num_reqs].long()
        token = self.context_lens[:num_reqs].long()[:, None] + torch.arange(self.query_len)
        sizes = self.page_sizes.long()[:, None, None]
        column = token[None] // sizes
        in_table = (column >= 0) & (column < self.block_tables.shape[2])
        page = self.block_tables[:, :num_reqs].long().gather(2, column * in_table)
        fits = (limits > 0) & (token[:, 0] >= 0) & (token[:, -1] < limits) & (in_table & (page >= 0)).all(0).all(1)
        self.slot_mappings.copy_(torch.where(fits[:, None], page * sizes + token % sizes, NO_SLOT).flatten(1))
        self.positions.copy_(torch.where(fits[:, None], token, 0).flatten())
        self.seq_lens.copy_(torch.where(fits, token[:, -1] + 1, 0))
        self.overflow[:num_reqs] |= ((limits > 0) & ~fits).int()

    def launch(self) -> None:
        groups, _, max_pages = self.block_tables.shape
        _set_extend_state_kernel[(self.seq_lens.shape[0],)](
            seq_lens_ptr=self.seq_lens,
            positions_ptr=self.positions,
            slot_mappings_ptr=self.slot_mappings,
            overflow_ptr=self.overflow,
            context_lens_ptr=self.context_lens,
            block_tables_ptr=self.block_tables,
            page_sizes_ptr=self.page_sizes,
            token_limits_ptr=self.token_limits,
            query_len=self.query_len,
            max_pages=max_pages,
            stride_slot_group=self.slot_mappings.stride(0),
            stride_table_group=self.block_tables.stride(0),
            stride_table_row=self.block_tables.stride(1),
            GROUPS=groups,
            BLOCK_Q=next_power_of_2(self.query_len),
            num_warps=1,
            **dependent_launch(self.seq_lens.device),
        )


@triton.jit
def _set_extend_state_kernel(
    seq_lens_ptr,  # out: int32 [R]
    positions_ptr,  # out: int64 [R * query_len]
    slot_mappings_ptr,  # out: int64 [G, R * query_len]
    overflow_ptr,  # out: int32 [>= R]
    context_lens_ptr,  # int32 [>= R]
    block_tables_ptr,  # int32 [G, >= R, max_pages]
    page_sizes_ptr,  # int32 [G]
    token_limits_ptr,  # int32 [>= R]
    query_len,
    max_pages,
    stride_slot_group,
    stride_table_group,
    stride_table_row,
    GROUPS: tl.constexpr,  # G
    BLOCK_Q: tl.constexpr,  # query_len, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """positions = context_len + query, slots by page, seq_len = context_len + query_len. One program per row."""
    await_previous(PDL)
    row = tl.program_id(0)
    offs_q = tl.arange(0, BLOCK_Q)
    mask = offs_q < query_len
    limit = tl.load(token_limits_ptr + row)
    context_len = tl.load(context_lens_ptr + row)
    kv_pos = context_len + offs_q
    # 1. Whether all of the row's tokens fit, in every group (the sum context_len + query_len could overflow)
    fits = (limit > 0) & (context_len >= 0) & (context_len <= limit - query_len)
    table_ptr = block_tables_ptr + row.to(tl.int64) * stride_table_row
    for group in tl.static_range(GROUPS):
        column = kv_pos // tl.load(page_sizes_ptr + group)
        in_table = mask & fits & (column < max_pages)
        page = tl.load(table_ptr + group * stride_table_group + column, mask=in_table, other=-1)
        fits = fits & (tl.min(tl.where(mask, page, 0), 0) >= 0)
    # 2. The new state; inert if they do not fit
    for group in tl.static_range(GROUPS):
        page_size = tl.load(page_sizes_ptr + group)
        table_ptrs = table_ptr + group * stride_table_group + kv_pos // page_size
        page = tl.load(table_ptrs, mask=mask & fits, other=-1)
        slot = tl.where(fits, page.to(tl.int64) * page_size + kv_pos % page_size, -1)
        tl.store(slot_mappings_ptr + group * stride_slot_group + row * query_len + offs_q, slot, mask=mask)
    tl.store(positions_ptr + row * query_len + offs_q, tl.where(fits, kv_pos, 0).to(tl.int64), mask=mask)
    tl.store(seq_lens_ptr + row, tl.where(fits, context_len + query_len, 0))
    if (limit > 0) & (fits == 0):
        tl.store(overflow_ptr + row, 1)


class SetDecodeState(NamedTuple):
    """seq_lens int32 [R], positions int64 [R], slot_mappings int64 [G, R], step int64 [1]; extend_seq_lens and accepted
    int32 with at least R rows."""

    seq_lens: torch.Tensor
    positions: torch.Tensor
    slot_mappings: torch.Tensor
    step: torch.Tensor
    extend_seq_lens: torch.Tensor
    accepted: torch.Tensor
    query_len: int

    def reference(self) -> None:
        num_reqs = self.seq_lens.shape[0]
        extended = self.extend_seq_lens[:num_reqs]
        live = extended > 0
        position = extended - self.query_len + self.accepted[:num_reqs].clamp(0, self.query_len - 1)
        self.seq_lens.copy_(torch.where(live, position + 1, 0))
        self.positions.copy_(torch.where(live, position, 0))
        self.slot_mappings.fill_(NO_SLOT)
        self.step.zero_()

    def launch(self) -> None:
        num_reqs, block = self.seq_lens.shape[0], 128
        _set_decode_state_kernel[(cdiv(num_reqs, block),)](
            seq_lens_ptr=self.seq_lens,
            positions_ptr=self.positions,
            slot_mappings_ptr=self.slot_mappings,
            step_ptr=self.step,
            extend_seq_lens_ptr=self.extend_seq_lens,
            accepted_ptr=self.accepted,
            query_len=self.query_len,
            num_reqs=num_reqs,
            stride_slot_group=self.slot_mappings.stride(0),
            GROUPS=self.slot_mappings.shape[0],
            BLOCK_R=block,
            num_warps=1,
            **dependent_launch(self.seq_lens.device),
        )


@triton.jit
def _set_decode_state_kernel(
    seq_lens_ptr,  # out: int32 [R]
    positions_ptr,  # out: int64 [R]
    slot_mappings_ptr,  # out: int64 [G, R]
    step_ptr,  # out: int64 [1]
    extend_seq_lens_ptr,  # int32 [>= R]
    accepted_ptr,  # int32 [>= R]
    query_len,
    num_reqs,  # R
    stride_slot_group,
    GROUPS: tl.constexpr,  # G
    BLOCK_R: tl.constexpr,  # rows per program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """seq_len = extend_seq_len - query_len + num_accepted + 1, no slots. One program per BLOCK_R rows."""
    await_previous(PDL)
    offs_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = offs_r < num_reqs
    extend_seq_len = tl.load(extend_seq_lens_ptr + offs_r, mask=mask, other=0)
    live = extend_seq_len > 0
    num_accepted = tl.minimum(tl.maximum(tl.load(accepted_ptr + offs_r, mask=mask, other=0), 0), query_len - 1)
    position = extend_seq_len - query_len + num_accepted
    tl.store(seq_lens_ptr + offs_r, tl.where(live, position + 1, 0), mask=mask)
    tl.store(positions_ptr + offs_r, tl.where(live, position, 0).to(tl.int64), mask=mask)
    for group in tl.static_range(GROUPS):
        tl.store(slot_mappings_ptr + group * stride_slot_group + offs_r, tl.full((BLOCK_R,), -1, tl.int64), mask=mask)
    if tl.program_id(0) == 0:
        tl.store(step_ptr, tl.full((), 0, tl.int64))


_set_extend_state = define_op(
    "builders::set_extend_state", SetExtendState, mutates=("seq_lens", "positions", "slot_mappings", "overflow")
)
_set_decode_state = define_op(
    "builders::set_decode_state", SetDecodeState, mutates=("seq_lens", "positions", "slot_mappings", "step")
)
