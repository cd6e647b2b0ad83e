"""FlashInfer's split plan, recomputed on the device from the current lengths: which CTA attends to which tokens.

In CUDA graph mode FlashInfer's wrappers read their plan from an int workspace. Its offsets and the grid depend only on
the batch size and the heads, and only its contents on the lengths. So one plan() with any lengths fixes the layout, and
`replan` then writes what plan() would write for the lengths on the device. The rules are those of DecodePlan and
PrefillPlan in include/flashinfer/attention/scheduler.cuh of FlashInfer 0.6.12, unchanged in 0.7.2.

Terms: a *unit* is one query tile of one request; a *chunk* is the run of KV pages of a unit that one CTA takes, the
same size for all; a *tile* is one chunk of one unit, i.e. one CTA of the grid's first axis.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import astuple, fields
from typing import NamedTuple

import torch
from torch import Tensor

from builders.errors import require, require_tensor
from builders.flashinfer.layout import PlanLayout
from builders.kernels.op import define_op
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


def replan(seq_lens: Tensor, last_page_len: Tensor, workspace: Tensor, layout: PlanLayout, *, row_stride: int) -> None:
    """Update a wrapper's plan and last_page_len in place to match `seq_lens`; graph-safe, one kernel.

    seq_lens       int32 [num_reqs]   KV tokens per request; 0 in padding rows, which get one tile without tokens
    last_page_len  int32 [num_reqs]   the wrapper's buffer
    workspace      uint8 [n]          the wrapper's int workspace
    row_stride     kv_indptr is arange(num_reqs + 1) * row_stride, as in `TableRows`

    last_page_len becomes seq_len - (row_stride - 1) * page_size, mostly negative: FlashInfer adds the row's other
    entries back in uint32, which leaves seq_len. A tile starts below its request's seq_len, except the tile of an empty
    row and, with a sliding window, one that FlashInfer clamps: the CUDA-core kernel would hang on any other.
    Plan and kernel must not overlap: order this before run(), with a plain kernel in between if run() uses PDL.
    Raises BatchError, and writes nothing, for tensors or a workspace that do not fit the layout, and for a table that
    has room for 2**32 tokens or more.
    """
    num_reqs = layout.num_reqs
    for name, tensor in (("seq_lens", seq_lens), ("last_page_len", last_page_len)):
        require_tensor(name, tensor, shape=(num_reqs,), dtype=torch.int32, device=seq_lens.device)
    require_tensor("int workspace", workspace, shape=(None,), dtype=torch.uint8, device=seq_lens.device)
    require(
        workspace.shape[0] >= layout.num_bytes and workspace.shape[0] % 4 == 0,
        f"this plan needs {layout.num_bytes} bytes in a workspace of whole int32 elements, got {workspace.shape[0]} "
        "bytes. Pass the int workspace of the wrapper that made the plan.",
    )
    require(
        num_reqs * row_stride * layout.page_size < 1 << 32,
        f"FlashInfer counts the tokens of all rows of a block table in 32 bits, got {num_reqs} rows of {row_stride} "
        f"pages of {layout.page_size}; it would read wrong pages. Allow fewer requests or shorter ones.",
    )
    if not layout.split:
        torch.sub(seq_lens, (row_stride - 1) * layout.page_size, out=last_page_len)
        return
    _replan(seq_lens, last_page_len, workspace, row_stride, [int(value) for value in astuple(layout)])


class Replan(NamedTuple):
    """The arguments of `replan`. layout: the values of a PlanLayout, in field order."""

    seq_lens: Tensor
    last_page_len: Tensor
    workspace: Tensor
    row_stride: int
    layout: Sequence[int]

    def reference(self) -> None:
        layout = _plan_layout(self.layout)
        self.last_page_len.copy_(self.seq_lens - (self.row_stride - 1) * layout.page_size)
        # An empty row counts as one page. FlashInfer's CUDA-core planner gives it a tile but ignores it in the search
        # for the chunk size, so with many empty rows it writes past its grid.
        pages = (-(-self.seq_lens // layout.page_size)).clamp(1, layout.window_pages)
        chunk = _smallest_chunk(pages, layout.min_chunk_pages, layout.tile_budget // layout.query_tiles)
        chunks = -(-pages // chunk)
        of_unit = chunks.repeat_interleave(layout.query_tiles)
        unit = torch.arange(len(of_unit), device=of_unit.device).repeat_interleave(of_unit)
        kv_tile = torch.arange(len(unit), device=unit.device) - (of_unit.cumsum(0) - of_unit)[unit]
        plan = {
            "request_indices": unit // layout.query_tiles,
            "qo_tile_indices": unit % layout.query_tiles,
            "kv_tile_indices": kv_tile,
            "o_indptr": _offsets(chunks * layout.query_len),
            "merge_indptr": _offsets(chunks.repeat_interleave(layout.query_len)),
            "kv_chunk_size": pages.new_tensor([chunk * layout.page_size]),
        }
        ints = self.workspace.view(torch.int32)
        for name, (offset, length) in layout.arrays.items():
            ints[offset : offset + length] = torch.nn.functional.pad(plan[name], (0, length - len(plan[name])))
        mask = torch.arange(layout.padded_tiles, device=unit.device) < len(unit)
        self.workspace[layout.block_valid_mask :][: layout.padded_tiles] = mask

    def launch(self) -> None:
        layout = _plan_layout(self.layout)
        units = layout.num_reqs * layout.query_tiles
        # One tile more than the grid: the bin for masked units.
        block_tiles = next_power_of_2(layout.padded_tiles + 1)
        block_units = next_power_of_2(units)
        largest = max(block_tiles, block_units)
        warps = 1 if largest <= 256 else 4 if largest <= 1024 else 8
        _replan_kernel[(1,)](
            seq_lens_ptr=self.seq_lens,
            last_page_len_ptr=self.last_page_len,
            plan_bytes_ptr=self.workspace,
            plan_ptr=self.workspace.view(torch.int32),
            units=units,
            row_start=(self.row_stride - 1) * layout.page_size,
            min_chunk=layout.min_chunk_pages,
            window_pages=layout.window_pages,
            padded_tiles=layout.padded_tiles,
            tile_budget=layout.tile_budget,
            request_indices=layout.request_indices,
            qo_tile_indices=layout.qo_tile_indices,
            kv_tile_indices=layout.kv_tile_indices,
            o_indptr=layout.o_indptr,
            merge_indptr=layout.merge_indptr,
            kv_chunk_size=layout.kv_chunk_size,
            block_valid_mask=layout.block_valid_mask,
            query_len=layout.query_len,
            query_tiles=layout.query_tiles,
            PAGE_SIZE=layout.page_size,
            TENSOR_CORES=layout.tensor_cores,
            BLOCK_U=max(32 * warps, block_units),
            BLOCK_T=max(32 * warps, block_tiles),
            num_warps=warps,
            **dependent_launch(self.seq_lens.device),
        )


def _plan_layout(values: Sequence[int]) -> PlanLayout:
    return PlanLayout(**dict(zip((field.name for field in fields(PlanLayout)), values, strict=True)))  # type: ignore[arg-type]


def _smallest_chunk(pages: Tensor, min_chunk: int, budget: int) -> int:
    """Return the smallest chunk >= min_chunk that cuts `pages` into at most `budget` pieces; at most the longest."""
    sizes = range(min_chunk, int(pages.max()))
    return min_chunk + bisect_left(sizes, True, key=lambda size: int((-(-pages // size)).sum()) <= budget)


def _offsets(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


# Not specialised on these: the offsets differ by batch size, and each would compile another kernel.
@triton.jit(
    do_not_specialize=[
        "units",
        "row_start",
        "min_chunk",
        "window_pages",
        "padded_tiles",
        "tile_budget",
        "request_indices",
        "qo_tile_indices",
        "kv_tile_indices",
        "o_indptr",
        "merge_indptr",
        "kv_chunk_size",
        "block_valid_mask",
    ]
)
def _replan_kernel(
    seq_lens_ptr,  # int32 [num_reqs]
    last_page_len_ptr,  # out: int32 [num_reqs]
    plan_bytes_ptr,  # out: uint8 [n], the int workspace
    plan_ptr,  # out: int32 [n / 4], the same memory
    units,
    row_start,  # (row_stride - 1) * page_size
    min_chunk,  # minimum pages of a chunk
    window_pages,  # maximum pages of a request
    padded_tiles,  # of the grid
    tile_budget,
    request_indices,  # an offset in plan_ptr, like those that follow
    qo_tile_indices,
    kv_tile_indices,
    o_indptr,
    merge_indptr,
    kv_chunk_size,
    block_valid_mask,  # an offset in plan_bytes_ptr
    query_len,  # specialised if 1, like query_tiles; one kernel serves all other prompt lengths
    query_tiles,  # units of a request
    PAGE_SIZE: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    BLOCK_U: tl.constexpr,  # units, rounded up to a power of two
    BLOCK_T: tl.constexpr,  # padded_tiles + 1, likewise
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """One program makes the whole plan; see `PlanLayout` for what each array holds."""
    await_previous(PDL)
    # 1. The pages of each unit
    offs_u = tl.arange(0, BLOCK_U)
    mask_u = offs_u < units
    request = offs_u // query_tiles
    leads = mask_u & (offs_u % query_tiles == 0)
    seq_len = tl.load(seq_lens_ptr + request, mask=mask_u, other=0)
    tl.store(last_page_len_ptr + request, seq_len - row_start, mask=leads)
    pages = tl.minimum(tl.maximum(tl.cdiv(seq_len, PAGE_SIZE), 1), window_pages)
    pages = tl.where(mask_u, pages, 0)
    longest = tl.max(pages, 0)
    total = tl.sum(pages, 0)

    # 2. The pages of a chunk. Chunks of c pages make between total / c and (total - units) / c + units tiles, bounds
    # that leave few sizes to try. If even whole requests are too many tiles, nothing is cut.
    spare = tile_budget - units
    low = tl.maximum(tl.where(spare < 0, longest, tl.cdiv(total, tile_budget)), min_chunk)
    high = tl.where(spare > 0, tl.minimum(tl.cdiv(total - units, tl.maximum(spare, 1)), longest), longest)
    while low < high:
        middle = (low + high) // 2
        fits = tl.sum(tl.cdiv(pages, middle), 0) <= tile_budget
        low = tl.where(fits, low, middle + 1)
        high = tl.where(fits, middle, high)
    tl.store(plan_ptr + kv_chunk_size, low * PAGE_SIZE)

    # 3. Where the partial outputs of each request start, and of each query token
    chunks = tl.cdiv(pages, low)
    end = tl.cumsum(chunks, 0)
    start = end - chunks
    row = start // query_tiles * query_len
    tl.store(plan_ptr + o_indptr, 0)
    tl.store(plan_ptr + o_indptr + 1 + request, row + query_len * chunks, mask=leads)
    if TENSOR_CORES:
        tl.store(plan_ptr + merge_indptr, 0)
        for token in range(query_len):
            to = plan_ptr + merge_indptr + 1 + request * query_len + token
            tl.store(to, row + (token + 1) * chunks, mask=leads)

    # 4. The unit and the chunk of each tile
    offs_t = tl.arange(0, BLOCK_T)
    valid = offs_t < tl.sum(chunks, 0)
    begins = tl.histogram(tl.where(mask_u, start, BLOCK_T - 1), BLOCK_T)
    owner = tl.where(valid, tl.cumsum(begins, 0) - 1, 0)
    kv_tile = tl.where(valid, offs_t - tl.gather(start, owner, 0), 0)
    mask_t = offs_t < padded_tiles
    tl.store(plan_ptr + request_indices + offs_t, owner // query_tiles, mask=mask_t)
    tl.store(plan_ptr + kv_tile_indices + offs_t, kv_tile, mask=mask_t)
    if TENSOR_CORES:
        tl.store(plan_ptr + qo_tile_indices + offs_t, owner % query_tiles, mask=mask_t)
    tl.store(plan_bytes_ptr + block_valid_mask + offs_t, valid.to(tl.uint8), mask=mask_t)


_replan = define_op("builders::flashinfer_replan", Replan, mutates=("last_page_len", "workspace"))
