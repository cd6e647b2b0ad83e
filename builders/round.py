"""The shared state at the two points of a round where it is set, not advanced: before step 0 and before step 1."""

from __future__ import annotations

import torch

from builders._triton import triton, tl
from builders.batch import NO_SLOT, BatchBuffers


def begin_extend(batch: BatchBuffers, context_lens: torch.Tensor, num_reqs: int, query_len: int) -> None:
    """Set a uniform batch: row r asks query_len tokens behind its context_lens[r] (int32) KV tokens. One kernel.

    A row with token limit 0 is padding: seq_lens 0, positions 0, slots -1. A token at or past the row's limit, or
    without a page in some group, keeps its position and is written nowhere (slot -1).
    """
    tables = batch.tables
    torch.ops.builders.begin_extend(
        batch.seq_lens[:num_reqs],
        batch.positions[: num_reqs * query_len],
        batch.slot_mappings[:, : num_reqs * query_len],
        context_lens,
        tables.block_tables,
        tables.page_sizes,
        tables.token_limits,
        query_len,
    )


def begin_decode(
    batch: BatchBuffers, context_lens: torch.Tensor, accepted: torch.Tensor, num_reqs: int
) -> None:
    """Set the state the first advance starts from: row r holds context_lens[r] + accepted[r] + 1 tokens.

    context_lens, accepted: int32 [>= num_reqs]. Rows with token limit 0 are padding. step becomes 0.
    """
    tables = batch.tables
    torch.ops.builders.begin_decode(
        batch.seq_lens[:num_reqs],
        batch.positions[:num_reqs],
        batch.slot_mappings[:, :num_reqs],
        batch.step,
        context_lens,
        accepted,
        tables.token_limits,
    )


@torch.library.custom_op(
    "builders::begin_extend", mutates_args=("seq_lens", "positions", "slot_mappings"), device_types="cpu"
)
def _begin_extend(
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    slot_mappings: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    page_sizes: torch.Tensor,
    token_limits: torch.Tensor,
    query_len: int,
) -> None:
    num_reqs = seq_lens.shape[0]
    limits = token_limits[:num_reqs].long()[:, None]
    live = limits > 0
    token = context_lens[:num_reqs].long()[:, None] + torch.arange(query_len)
    sizes = page_sizes.long()[:, None, None]
    column = token[None] // sizes
    in_table = column < block_tables.shape[2]
    page = block_tables[:, :num_reqs].long().gather(2, column * in_table)
    writes = live & (token < limits) & (in_table & (page >= 0)).all(0)
    slot_mappings.copy_(torch.where(writes, page * sizes + token % sizes, NO_SLOT).flatten(1))
    positions.copy_(torch.where(live, token, 0).flatten())
    seq_lens.copy_(torch.where(live, token[:, -1:] + 1, 0)[:, 0])


@_begin_extend.register_fake
def _(*args: object) -> None:
    return None


@_begin_extend.register_kernel("cuda")
def _begin_extend_cuda(
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    slot_mappings: torch.Tensor,
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
    )


@triton.jit
def _begin_extend_kernel(
    seq_lens,
    positions,
    slot_mappings,
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
):
    row = tl.program_id(0)
    query = tl.arange(0, BLOCK)
    inside = query < query_len
    limit = tl.load(token_limits + row)
    context = tl.load(context_lens + row)
    live = limit > 0
    token = context + query
    writes = inside & (token < limit)
    table = block_tables + row.to(tl.int64) * row_stride
    for group in tl.static_range(GROUPS):
        column = token // tl.load(page_sizes + group)
        page = tl.load(table + group * table_stride + column, mask=writes & (column < max_pages), other=-1)
        writes = writes & (page >= 0)
    for group in tl.static_range(GROUPS):
        size = tl.load(page_sizes + group)
        page = tl.load(table + group * table_stride + token // size, mask=writes, other=-1).to(tl.int64)
        slot = tl.where(writes, page * size + token % size, -1)
        tl.store(slot_mappings + group * slots_stride + row * query_len + query, slot, mask=inside)
    tl.store(positions + row * query_len + query, tl.where(live, token, 0).to(tl.int64), mask=inside)
    tl.store(seq_lens + row, tl.where(live, context + query_len, 0))


@torch.library.custom_op(
    "builders::begin_decode", mutates_args=("seq_lens", "positions", "slot_mappings", "step"), device_types="cpu"
)
def _begin_decode(
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    slot_mappings: torch.Tensor,
    step: torch.Tensor,
    context_lens: torch.Tensor,
    accepted: torch.Tensor,
    token_limits: torch.Tensor,
) -> None:
    num_reqs = seq_lens.shape[0]
    live = token_limits[:num_reqs] > 0
    position = context_lens[:num_reqs] + accepted[:num_reqs]
    seq_lens.copy_(torch.where(live, position + 1, 0))
    positions.copy_(torch.where(live, position, 0))
    slot_mappings.fill_(NO_SLOT)
    step.zero_()


@_begin_decode.register_fake
def _(*args: object) -> None:
    return None


@_begin_decode.register_kernel("cuda")
def _begin_decode_cuda(
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    slot_mappings: torch.Tensor,
    step: torch.Tensor,
    context_lens: torch.Tensor,
    accepted: torch.Tensor,
    token_limits: torch.Tensor,
) -> None:
    num_reqs = seq_lens.shape[0]
    block = 128
    _begin_decode_kernel[(triton.cdiv(num_reqs, block),)](
        seq_lens,
        positions,
        slot_mappings,
        step,
        context_lens,
        accepted,
        token_limits,
        num_reqs,
        slot_mappings.stride(0),
        GROUPS=slot_mappings.shape[0],
        BLOCK=block,
        num_warps=1,
    )


@triton.jit
def _begin_decode_kernel(
    seq_lens,
    positions,
    slot_mappings,
    step,
    context_lens,
    accepted,
    token_limits,
    num_reqs,
    slots_stride,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_reqs
    live = tl.load(token_limits + row, mask=inside, other=0) > 0
    position = tl.load(context_lens + row, mask=inside, other=0) + tl.load(accepted + row, mask=inside, other=0)
    tl.store(seq_lens + row, tl.where(live, position + 1, 0), mask=inside)
    tl.store(positions + row, tl.where(live, position, 0).to(tl.int64), mask=inside)
    for group in tl.static_range(GROUPS):
        tl.store(slot_mappings + group * slots_stride + row, tl.full((BLOCK,), -1, tl.int64), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(step, tl.full((), 0, tl.int64))
