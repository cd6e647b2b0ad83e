"""The shared state at the two points of a round where it is set, not advanced: before step 0 and before step 1."""

from __future__ import annotations

import torch

from builders.batch import NO_SLOT, BatchBuffers
from builders.kernels.op_by_schema import define_op_by_schema
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


def begin_extend(batch: BatchBuffers, context_lens: torch.Tensor, num_reqs: int, query_len: int) -> None:
    """Set a uniform batch: row r asks query_len tokens behind its context_lens[r] (int32) KV tokens. One kernel.

    A row with token limit 0 is padding. A live row whose tokens do not all fit under its limit, or lack a page in some
    group, raises tables.overflow. Both are inert: seq_lens 0, positions 0, slots -1. context_lens must not lie before
    the first position the row may write: only the device knows it, so nothing here can check that.
    """
    tables = batch.tables
    _begin_extend_op(
        batch.seq_lens[:num_reqs],
        batch.positions[: num_reqs * query_len],
        batch.slot_mappings[:, : num_reqs * query_len],
        tables.overflow,
        context_lens,
        tables.block_tables,
        tables.page_sizes,
        tables.token_limits,
        query_len,
    )


def begin_decode(
    batch: BatchBuffers, extend_seq_lens: torch.Tensor, accepted: torch.Tensor, num_reqs: int, query_len: int
) -> None:
    """Set the state the first advance starts from, behind a uniform batch of query_len tokens a row. One kernel.

    Row r keeps the tokens up to the accepted[r]-th (int32) of its query: seq_lens = extend_seq_lens[r] - query_len +
    accepted[r] + 1. A count outside 0 to query_len - 1, which only the device could know of, counts as the nearest of
    these. A row with extend_seq_lens 0 stays inert. step becomes 0, slots -1: nothing is being written yet.
    """
    _begin_decode_op(
        batch.seq_lens[:num_reqs],
        batch.positions[:num_reqs],
        batch.slot_mappings[:, :num_reqs],
        batch.step,
        extend_seq_lens,
        accepted,
        query_len,
    )


def _begin_extend(
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    slot_mappings: torch.Tensor,
    overflow: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    page_sizes: torch.Tensor,
    token_limits: torch.Tensor,
    query_len: int,
) -> None:
    num_reqs = seq_lens.shape[0]
    limits = token_limits[:num_reqs].long()
    token = context_lens[:num_reqs].long()[:, None] + torch.arange(query_len)
    sizes = page_sizes.long()[:, None, None]
    column = token[None] // sizes
    in_table = column < block_tables.shape[2]
    page = block_tables[:, :num_reqs].long().gather(2, column * in_table)
    fits = (limits > 0) & (token[:, -1] < limits) & (in_table & (page >= 0)).all(0).all(1)
    slot_mappings.copy_(torch.where(fits[:, None], page * sizes + token % sizes, NO_SLOT).flatten(1))
    positions.copy_(torch.where(fits[:, None], token, 0).flatten())
    seq_lens.copy_(torch.where(fits, token[:, -1] + 1, 0))
    overflow[:num_reqs] |= ((limits > 0) & ~fits).int()


def _launch_begin_extend(
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    slot_mappings: torch.Tensor,
    overflow: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    page_sizes: torch.Tensor,
    token_limits: torch.Tensor,
    query_len: int,
) -> None:
    _begin_extend_kernel[(seq_lens.shape[0],)](
        seq_lens,
        positions,
        slot_mappings,
        overflow,
        context_lens,
        block_tables,
        page_sizes,
        token_limits,
        query_len,
        block_tables.shape[2],
        slot_mappings.stride(0),
        block_tables.stride(0),
        block_tables.stride(1),
        GROUPS=block_tables.shape[0],
        BLOCK=triton.next_power_of_2(query_len),
        num_warps=1,
        **dependent_launch(seq_lens.device),
    )


@triton.jit
def _begin_extend_kernel(
    seq_lens,
    positions,
    slot_mappings,
    overflow,
    context_lens,
    block_tables,
    page_sizes,
    token_limits,
    query_len,
    max_pages,
    slots_stride,
    table_stride,
    row_stride,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    row = tl.program_id(0)
    query = tl.arange(0, BLOCK)
    inside = query < query_len
    limit = tl.load(token_limits + row)
    context = tl.load(context_lens + row)
    token = context + query
    fits = (limit > 0) & (context + query_len <= limit)
    table = block_tables + row.to(tl.int64) * row_stride
    for group in tl.static_range(GROUPS):
        column = token // tl.load(page_sizes + group)
        owned = tl.load(table + group * table_stride + column, mask=inside & fits & (column < max_pages), other=-1)
        fits = fits & (tl.min(tl.where(inside, owned, 0), 0) >= 0)
    for group in tl.static_range(GROUPS):
        size = tl.load(page_sizes + group)
        page = tl.load(table + group * table_stride + token // size, mask=inside & fits, other=-1).to(tl.int64)
        slot = tl.where(fits, page * size + token % size, -1)
        tl.store(slot_mappings + group * slots_stride + row * query_len + query, slot, mask=inside)
    tl.store(positions + row * query_len + query, tl.where(fits, token, 0).to(tl.int64), mask=inside)
    tl.store(seq_lens + row, tl.where(fits, context + query_len, 0))
    if (limit > 0) & (fits == 0):
        tl.store(overflow + row, 1)


def _begin_decode(
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    slot_mappings: torch.Tensor,
    step: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    accepted: torch.Tensor,
    query_len: int,
) -> None:
    num_reqs = seq_lens.shape[0]
    live = extend_seq_lens[:num_reqs] > 0
    position = extend_seq_lens[:num_reqs] - query_len + accepted[:num_reqs].clamp(0, query_len - 1)
    seq_lens.copy_(torch.where(live, position + 1, 0))
    positions.copy_(torch.where(live, position, 0))
    slot_mappings.fill_(NO_SLOT)
    step.zero_()


def _launch_begin_decode(
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    slot_mappings: torch.Tensor,
    step: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    accepted: torch.Tensor,
    query_len: int,
) -> None:
    num_reqs = seq_lens.shape[0]
    block = 128
    _begin_decode_kernel[(triton.cdiv(num_reqs, block),)](
        seq_lens,
        positions,
        slot_mappings,
        step,
        extend_seq_lens,
        accepted,
        query_len,
        num_reqs,
        slot_mappings.stride(0),
        GROUPS=slot_mappings.shape[0],
        BLOCK=block,
        num_warps=1,
        **dependent_launch(seq_lens.device),
    )


@triton.jit
def _begin_decode_kernel(
    seq_lens,
    positions,
    slot_mappings,
    step,
    extend_seq_lens,
    accepted,
    query_len,
    num_reqs,
    slots_stride,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_reqs
    extended = tl.load(extend_seq_lens + row, mask=inside, other=0)
    live = extended > 0
    kept = tl.minimum(tl.maximum(tl.load(accepted + row, mask=inside, other=0), 0), query_len - 1)
    position = extended - query_len + kept
    tl.store(seq_lens + row, tl.where(live, position + 1, 0), mask=inside)
    tl.store(positions + row, tl.where(live, position, 0).to(tl.int64), mask=inside)
    for group in tl.static_range(GROUPS):
        tl.store(slot_mappings + group * slots_stride + row, tl.full((BLOCK,), -1, tl.int64), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(step, tl.full((), 0, tl.int64))


_begin_extend_op = define_op_by_schema(
    "builders::begin_extend",
    "(Tensor(a!) seq_lens, Tensor(b!) positions, Tensor(c!) slot_mappings, Tensor(d!) overflow, Tensor context_lens, "
    "Tensor block_tables, Tensor page_sizes, Tensor token_limits, int query_len) -> ()",
    cpu=_begin_extend,
    cuda=_launch_begin_extend,
)

_begin_decode_op = define_op_by_schema(
    "builders::begin_decode",
    "(Tensor(a!) seq_lens, Tensor(b!) positions, Tensor(c!) slot_mappings, Tensor(d!) step, Tensor extend_seq_lens, "
    "Tensor accepted, int query_len) -> ()",
    cpu=_begin_decode,
    cuda=_launch_begin_decode,
)
