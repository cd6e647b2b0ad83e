"""Lists of slots in a compressed cache, whose entry j stands for tokens j * ratio .. (j + 1) * ratio - 1.

Both functions are graph-safe: one kernel, shapes from the host, everything else from the device.
"""

from __future__ import annotations

import torch

from builders.errors import require
from builders.kernels.op_by_schema import define_op_by_schema
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from builders.sparse_window import live_row, live_rows, load_slots, slots_of

_BLOCK = 1024


def compressed_window(
    indices: torch.Tensor,
    lens: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    *,
    ratio: int,
    page_size: int,
    max_seq_len: int,
) -> None:
    """List every complete entry a query token sees, in place: a token at position p sees entries j < (p + 1) // ratio.

    indices int32 [T, width] contiguous: slots page * page_size + offset in ascending order of entries, -1 behind them;
    lens int32 [T]: their number, 0 for the tokens of padding rows. positions int64 [T], seq_lens int32 [R] and
    query_start_loc int32 [R + 1] are the batch's; block_table int32 [R, max_pages] is the compressed cache's, with
    page_size entries a page, and is read only below a token's number of entries. max_seq_len: the batch's bound.
    Raises BatchError, with nothing written, for a width that max_seq_len tokens would not fit.
    """
    require(
        ratio >= 1 and indices.shape[1] >= max_seq_len // ratio,
        f"lists must hold the {max_seq_len} // {ratio} entries of the longest request, got a width of "
        f"{indices.shape[1]}; the last entries would be dropped unseen, so nothing was listed. Allocate wider lists.",
    )
    _compressed_window_op(indices, lens, positions, seq_lens, query_start_loc, block_table, ratio, page_size)


def translate_topk(
    topk: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    *,
    page_size: int,
) -> torch.Tensor:
    """The slots int32 [T, k] of an indexer's entry numbers topk int32 [T, k], in their order; -1 stays -1.

    block_table int32 [R, max_pages] is the compressed cache's, with page_size entries a page, and is read for entries
    >= 0 only. A token of a padding row gets -1 throughout, whatever its entry numbers.
    """
    slots: torch.Tensor = _translate_topk_op(topk, seq_lens, query_start_loc, block_table, page_size)
    return slots


def _compressed_window(
    indices: torch.Tensor,
    lens: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    ratio: int,
    page_size: int,
) -> None:
    tokens, width = indices.shape
    row, live = live_rows(query_start_loc, seq_lens, tokens)
    counts = torch.where(live, (positions + 1) // ratio, 0)
    entries = torch.arange(width).expand(tokens, width)
    indices.copy_(slots_of(entries, entries < counts[:, None], row, block_table, page_size))
    lens.copy_(counts)


def _launch_window(
    indices: torch.Tensor,
    lens: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    ratio: int,
    page_size: int,
) -> None:
    tokens, width = indices.shape
    block = min(_BLOCK, triton.next_power_of_2(width))
    _compressed_window_kernel[(tokens, triton.cdiv(width, block))](
        indices,
        lens,
        positions,
        seq_lens,
        query_start_loc,
        block_table,
        width,
        seq_lens.shape[0],
        block_table.stride(0),
        RATIO=ratio,
        PAGE_SIZE=page_size,
        BLOCK=block,
        BLOCK_R=triton.next_power_of_2(seq_lens.shape[0]),
        num_warps=4,
        **dependent_launch(positions.device),
    )


@triton.jit
def _compressed_window_kernel(
    indices,
    lens,
    positions,
    seq_lens,
    query_start_loc,
    block_table,
    width,
    num_reqs,
    table_stride,
    RATIO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    row, live = live_row(query_start_loc, seq_lens, token, num_reqs, BLOCK_R)
    count = tl.where(live, (tl.load(positions + token).to(tl.int32) + 1) // RATIO, 0)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slots = load_slots(block_table + row.to(tl.int64) * table_stride, entry, entry < count, PAGE_SIZE)
    tl.store(indices + token * width + entry, slots, mask=entry < width)
    if tl.program_id(1) == 0:
        tl.store(lens + token, count)


def _translate_topk(
    topk: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
) -> torch.Tensor:
    row, live = live_rows(query_start_loc, seq_lens, topk.shape[0])
    return slots_of(topk, live[:, None] & (topk >= 0), row, block_table, page_size)


def _launch_translate(
    topk: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
) -> torch.Tensor:
    tokens, width = topk.shape
    slots = topk.new_empty(topk.shape)
    block = min(_BLOCK, triton.next_power_of_2(width))
    _translate_topk_kernel[(tokens, triton.cdiv(width, block))](
        topk,
        slots,
        seq_lens,
        query_start_loc,
        block_table,
        width,
        seq_lens.shape[0],
        topk.stride(0),
        topk.stride(1),
        block_table.stride(0),
        PAGE_SIZE=page_size,
        BLOCK=block,
        BLOCK_R=triton.next_power_of_2(seq_lens.shape[0]),
        num_warps=4,
        **dependent_launch(topk.device),
    )
    return slots


@triton.jit
def _translate_topk_kernel(
    topk,
    slots,
    seq_lens,
    query_start_loc,
    block_table,
    width,
    num_reqs,
    topk_stride,
    entry_stride,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    row, live = live_row(query_start_loc, seq_lens, token, num_reqs, BLOCK_R)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(topk + token * topk_stride + lane * entry_stride, mask=live & (lane < width), other=-1)
    found = load_slots(block_table + row.to(tl.int64) * table_stride, entry, entry >= 0, PAGE_SIZE)
    tl.store(slots + token * width + lane, found, mask=lane < width)


_compressed_window_op = define_op_by_schema(
    "builders::compressed_window",
    "(Tensor(a!) indices, Tensor(b!) lens, Tensor positions, Tensor seq_lens, Tensor query_start_loc, "
    "Tensor block_table, int ratio, int page_size) -> ()",
    cpu=_compressed_window,
    cuda=_launch_window,
)
_translate_topk_op = define_op_by_schema(
    "builders::translate_topk",
    "(Tensor topk, Tensor seq_lens, Tensor query_start_loc, Tensor block_table, int page_size) -> Tensor",
    cpu=_translate_topk,
    cuda=_launch_translate,
    fake=lambda topk, *rest: topk.new_empty(topk.shape),
)
