"""FlashInfer's split plan, recomputed on the device: which CTA attends to which tokens, from the lengths as they stand.

In CUDA-graph mode FlashInfer's wrappers read their plan from an int workspace. Its offsets and the grid follow from the
batch size and the heads alone, only the contents depend on the lengths: one plan() on any lengths fixes the layout, and
`replan` then writes what plan() would write for the lengths on the device. The rules are those of DecodePlan and
PrefillPlan in include/flashinfer/attention/scheduler.cuh of FlashInfer 0.6.12, unchanged in 0.7.2.

The words here: a *unit* is one query tile of one request; a *chunk* is the run of KV pages that one CTA takes of it, of
one size for all; a *tile* is a chunk of a unit, one CTA of the grid's first axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch

from builders._ops import define_op
from builders._triton import interpreting, tl, triton
from builders.errors import require, require_tensor

_MIN_CHUNK_TOKENS = 128
_EVERY_PAGE = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanLayout:
    """Where the plan of one wrapper lies in its int workspace, and the constants it is made from.

    The fields named like plan arrays are offsets, in int32 elements; that of block_valid_mask is in bytes.
    """

    num_reqs: int
    page_size: int
    tensor_cores: bool
    split: bool
    """Whether requests are cut into chunks. Without it the plan does not depend on the lengths."""
    padded_tiles: int
    """CTAs of the grid's first axis, whatever the lengths."""
    tile_budget: int
    """The chunk is the smallest that needs no more tiles than this."""
    request_indices: int
    """Array [padded_tiles]: the request of each tile."""
    kv_tile_indices: int
    """Array [padded_tiles]: the chunk of each tile."""
    o_indptr: int
    """Array [num_reqs + 1]: where the partial outputs of each request start, a row per query token and chunk."""
    kv_chunk_size: int
    """One int: tokens of a chunk."""
    block_valid_mask: int
    """Bytes [padded_tiles]: whether the CTA has a tile."""
    qo_tile_indices: int = 0
    """Array [padded_tiles]: the query tile of each tile. Tensor cores only."""
    merge_indptr: int = 0
    """Array [num_reqs * query_len + 1]: o_indptr by query token. Tensor cores only."""
    query_len: int = 1
    query_tiles: int = 1
    """Query tiles of a request: its query_len tokens times the heads of a group, in tiles of FlashInfer's choice."""
    window_pages: int = _EVERY_PAGE
    """Pages of a request that are planned at most: those that its sliding window can reach."""

    @classmethod
    def of_cuda_cores(cls, plan_info: Sequence[int], *, num_reqs: int, page_size: int) -> PlanLayout:
        """From the plan info of a decode wrapper with use_tensor_cores=False, planned with use_cuda_graph=True.

        The planner of this kernel knows no sliding window: it cuts the whole request. Raises BatchError for plan info
        of another kind, another FlashInfer, or another batch size.
        """
        info = _checked(plan_info, length=10, graph_flag=8)
        padded, split = info[0], bool(info[9])
        require(
            padded >= num_reqs if split else padded == num_reqs,
            f"a plan of {num_reqs} requests needs {'at least' if split else 'exactly'} {num_reqs} tiles, got {padded}; "
            "its arrays would be written past their ends. Plan with the batch size that is going to run.",
        )
        return cls(
            num_reqs=num_reqs,
            page_size=page_size,
            tensor_cores=False,
            split=split,
            padded_tiles=padded,
            tile_budget=padded,
            request_indices=_element(info[3]),
            kv_tile_indices=_element(info[4]),
            o_indptr=_element(info[5]),
            block_valid_mask=info[6],
            kv_chunk_size=_element(info[7]),
        )

    @classmethod
    def of_tensor_cores(
        cls,
        plan_info: Sequence[int],
        *,
        num_reqs: int,
        page_size: int,
        num_q_heads: int,
        num_kv_heads: int,
        num_sms: int,
        query_len: int = 1,
        window_left: int = -1,
    ) -> PlanLayout:
        """From the plan info of FA2: a decode wrapper with use_tensor_cores=True, or a prefill wrapper.

        Planned with use_cuda_graph=True for num_reqs requests of query_len tokens each, with the same window_left
        (-1: none), on a device of num_sms SMs. Raises BatchError for plan info of another kind or of another
        FlashInfer, for another batch, and for a plan without splits (disable_split_kv).
        """
        info = _checked(plan_info, length=15, graph_flag=13)
        padded, rows, query_tile = info[0], info[1], info[3]
        require(
            bool(info[14]),
            "a plan that is recomputed on the device must split the KV tokens, got split_kv off; its padding tiles "
            "would have no mask to stop them. Plan without disable_split_kv and without fixed_split_size.",
        )
        require(
            rows == num_reqs * query_len,
            f"the plan must be made for {num_reqs} requests of {query_len} query tokens, got one for {rows} tokens; "
            "its arrays would be written past their ends. Plan with the batch that is going to run.",
        )
        budget = 2 * num_sms // num_kv_heads
        query_tiles = -(-query_len * (num_q_heads // num_kv_heads) // query_tile)
        needed = max(budget, num_reqs * query_tiles)
        require(
            padded >= needed,
            f"{num_reqs} requests of {query_tiles} query tiles and {num_kv_heads} KV heads on {num_sms} SMs need a "
            f"plan of {needed} tiles or more, got {padded}; its arrays would be written past their ends. Pass the "
            "heads and the device that were planned for.",
        )
        reach = window_left + query_tile
        return cls(
            num_reqs=num_reqs,
            page_size=page_size,
            tensor_cores=True,
            split=True,
            padded_tiles=padded,
            tile_budget=budget,
            request_indices=_element(info[4]),
            qo_tile_indices=_element(info[5]),
            kv_tile_indices=_element(info[6]),
            merge_indptr=_element(info[7]),
            o_indptr=_element(info[8]),
            kv_chunk_size=_element(info[9]),
            block_valid_mask=info[12],
            query_len=query_len,
            query_tiles=query_tiles,
            window_pages=_EVERY_PAGE if window_left < 0 else -(-reach // page_size),
        )

    @property
    def min_chunk_pages(self) -> int:
        return max(_MIN_CHUNK_TOKENS // self.page_size, 1)

    @property
    def arrays(self) -> dict[str, tuple[int, int]]:
        """Offset and length of every int32 array that replan writes, by name."""
        names = {
            "request_indices": self.padded_tiles,
            "kv_tile_indices": self.padded_tiles,
            "o_indptr": self.num_reqs + 1,
        }
        if self.split:
            names["kv_chunk_size"] = 1
        if self.tensor_cores:
            names["qo_tile_indices"] = self.padded_tiles
            names["merge_indptr"] = self.num_reqs * self.query_len + 1
        return {name: (getattr(self, name), length) for name, length in names.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of the int workspace up to the end of the plan."""
        ends = [4 * (offset + length) for offset, length in self.arrays.values()]
        return max([*ends, self.block_valid_mask + self.padded_tiles if self.split else 0])


def _checked(plan_info: Sequence[int], *, length: int, graph_flag: int) -> list[int]:
    info = [int(value) for value in plan_info]
    require(
        len(info) == length,
        f"plan info of this kernel holds {length} values in FlashInfer 0.6.12 to 0.7.2, got {len(info)}; their meaning "
        "is unknown, so nothing was read from them. Use one of these releases, and the layout of the right kernel.",
    )
    require(
        bool(info[graph_flag]),
        "the plan must be made in CUDA-graph mode, got one whose grid follows the lengths; a replay would run the old "
        "grid over a new plan. Construct the wrapper with use_cuda_graph=True.",
    )
    return info


def _element(offset: int) -> int:
    require(
        offset % 4 == 0,
        f"an int32 array starts at a multiple of 4 bytes, got offset {offset}; the plan info means something else than "
        "this layout knows, so nothing was written. Use FlashInfer 0.6.12 to 0.7.2.",
    )
    return offset // 4


def replan(
    seq_lens: torch.Tensor,
    last_page_len: torch.Tensor,
    workspace: torch.Tensor,
    layout: PlanLayout,
    *,
    table_width: int,
) -> None:
    """Make a wrapper's plan and last_page_len those of `seq_lens`, in place; graph-safe, one kernel.

    seq_lens       int32 [num_reqs]   KV tokens of each request; 0 in padding rows, which get one tile without tokens
    last_page_len  int32 [num_reqs]   the wrapper's buffer
    workspace      uint8 [n]          the wrapper's int workspace
    table_width    pages of a row where kv_indptr is arange(num_reqs + 1) * table_width: the flattened block table

    last_page_len becomes seq_len - (table_width - 1) * page_size, mostly negative: FlashInfer adds the row's other
    pages back in uint32, which leaves seq_len. A tile starts below its request's seq_len, except the tile of an empty
    row and, with a sliding window, one that FlashInfer clamps: the CUDA-core kernel never ends on any other.
    Plan and kernel must not overlap: order this before run(), and a plain kernel in between where run() uses PDL.
    """
    num_reqs = layout.num_reqs
    for name, tensor in (("seq_lens", seq_lens), ("last_page_len", last_page_len)):
        require_tensor(name, tensor, shape=(num_reqs,), dtype=torch.int32, device=seq_lens.device)
    require_tensor("int workspace", workspace, shape=(None,), dtype=torch.uint8, device=seq_lens.device)
    require(
        workspace.shape[0] >= layout.num_bytes and workspace.shape[0] % 4 == 0,
        f"this plan takes {layout.num_bytes} bytes of a workspace of whole int32 elements, got {workspace.shape[0]} "
        "bytes; nothing was written. Pass the int workspace of the wrapper that made the plan.",
    )
    if not layout.split:
        torch.sub(seq_lens, (table_width - 1) * layout.page_size, out=last_page_len)
        return
    _replan_op(seq_lens, last_page_len, workspace, table_width, [int(value) for value in astuple(layout)])


def read_plan(workspace: torch.Tensor, layout: PlanLayout) -> dict[str, list[int]]:
    """The plan in an int workspace as lists by array name, without what padding tiles hold; waits for the device."""
    host = workspace.cpu()
    ints = host.view(torch.int32)
    plan = {name: ints[offset : offset + length].tolist() for name, (offset, length) in layout.arrays.items()}
    if not layout.split:
        return plan
    mask = host[layout.block_valid_mask :][: layout.padded_tiles].tolist()
    tiles = sum(mask)
    trimmed = {name: values[:tiles] if name.endswith("indices") else values for name, values in plan.items()}
    return {**trimmed, "block_valid_mask": mask}


def _replan(
    seq_lens: torch.Tensor, last_page_len: torch.Tensor, workspace: torch.Tensor, table_width: int, packed: list[int]
) -> None:
    if interpreting():
        _launch(seq_lens, last_page_len, workspace, table_width, packed)
        return
    layout = _unpacked(packed)
    last_page_len.copy_(seq_lens - (table_width - 1) * layout.page_size)
    # An empty row counts as a page. FlashInfer's CUDA-core planner gives it a tile but leaves it out of the search for
    # the chunk, and among many of them it writes past its grid.
    pages = (-(-seq_lens // layout.page_size)).clamp(1, layout.window_pages)
    chunk = _smallest_chunk(pages, layout.min_chunk_pages, layout.tile_budget // layout.query_tiles)
    chunks = -(-pages // chunk)
    of_unit = chunks.repeat_interleave(layout.query_tiles)
    unit = torch.arange(len(of_unit)).repeat_interleave(of_unit)
    kv_tile = torch.arange(len(unit)) - (of_unit.cumsum(0) - of_unit)[unit]
    plan = {
        "request_indices": unit // layout.query_tiles,
        "qo_tile_indices": unit % layout.query_tiles,
        "kv_tile_indices": kv_tile,
        "o_indptr": _from_zero(chunks * layout.query_len),
        "merge_indptr": _from_zero(chunks.repeat_interleave(layout.query_len)),
        "kv_chunk_size": torch.tensor([chunk * layout.page_size]),
    }
    ints = workspace.view(torch.int32)
    for name, (offset, length) in layout.arrays.items():
        ints[offset : offset + length] = torch.nn.functional.pad(plan[name], (0, length - len(plan[name])))
    mask = torch.arange(layout.padded_tiles) < len(unit)
    workspace[layout.block_valid_mask : layout.block_valid_mask + layout.padded_tiles] = mask


def _unpacked(packed: list[int]) -> PlanLayout:
    return PlanLayout(**dict(zip((field.name for field in fields(PlanLayout)), packed, strict=True)))  # type: ignore[arg-type]


def _smallest_chunk(pages: torch.Tensor, min_chunk: int, budget: int) -> int:
    """The smallest chunk from min_chunk on that cuts `pages` into at most `budget` pieces; at most the longest."""
    low, high = min_chunk, int(pages.max())
    while low < high:
        middle = (low + high) // 2
        if int((-(-pages // middle)).sum()) > budget:
            low = middle + 1
        else:
            high = middle
    return low


def _from_zero(counts: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def _launch(
    seq_lens: torch.Tensor, last_page_len: torch.Tensor, workspace: torch.Tensor, table_width: int, packed: list[int]
) -> None:
    layout = _unpacked(packed)
    units = layout.num_reqs * layout.query_tiles
    # One tile more than the grid has: where units that do not exist are counted.
    block_tiles = triton.next_power_of_2(layout.padded_tiles + 1)
    block_units = triton.next_power_of_2(units)
    largest = max(block_tiles, block_units)
    warps = 1 if largest <= 256 else 4 if largest <= 1024 else 8
    _replan_kernel[(1,)](
        seq_lens,
        last_page_len,
        workspace.view(torch.int32),
        workspace,
        units,
        (table_width - 1) * layout.page_size,
        layout.min_chunk_pages,
        layout.window_pages,
        layout.padded_tiles,
        layout.tile_budget,
        layout.request_indices,
        layout.qo_tile_indices,
        layout.kv_tile_indices,
        layout.o_indptr,
        layout.merge_indptr,
        layout.kv_chunk_size,
        layout.block_valid_mask,
        PAGE_SIZE=layout.page_size,
        QUERY_LEN=layout.query_len,
        QUERY_TILES=layout.query_tiles,
        TENSOR_CORES=layout.tensor_cores,
        BLOCK_U=max(32 * warps, block_units),
        BLOCK_T=max(32 * warps, block_tiles),
        num_warps=warps,
    )


# Specialised on none of these: the offsets differ by batch size, and a kernel for each would be compiled.
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
    seq_lens,
    last_page_len,
    plan,
    plan_bytes,
    units,
    row_start,
    min_chunk,
    window_pages,
    padded_tiles,
    tile_budget,
    request_indices,
    qo_tile_indices,
    kv_tile_indices,
    o_indptr,
    merge_indptr,
    kv_chunk_size,
    block_valid_mask,
    PAGE_SIZE: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    QUERY_TILES: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    unit = tl.arange(0, BLOCK_U)
    inside = unit < units
    request = unit // QUERY_TILES
    leads = inside & (unit % QUERY_TILES == 0)
    seq_len = tl.load(seq_lens + request, mask=inside, other=0)
    tl.store(last_page_len + request, seq_len - row_start, mask=leads)
    pages = tl.minimum(tl.maximum(tl.cdiv(seq_len, PAGE_SIZE), 1), window_pages)
    pages = tl.where(inside, pages, 0)
    longest = tl.max(pages, 0)
    total = tl.sum(pages, 0)

    # A chunk of c pages makes between total / c and (total - units) / c + units tiles: between the bounds that this
    # sets few sizes are left to try. Where even whole requests are too many tiles, nothing is cut.
    spare = tile_budget - units
    low = tl.maximum(tl.where(spare < 0, longest, tl.cdiv(total, tile_budget)), min_chunk)
    high = tl.where(spare > 0, tl.minimum(tl.cdiv(total - units, tl.maximum(spare, 1)), longest), longest)
    while low < high:
        middle = (low + high) // 2
        fits = tl.sum(tl.cdiv(pages, middle), 0) <= tile_budget
        low = tl.where(fits, low, middle + 1)
        high = tl.where(fits, middle, high)
    tl.store(plan + kv_chunk_size, low * PAGE_SIZE)

    chunks = tl.cdiv(pages, low)
    end = tl.cumsum(chunks, 0)
    start = end - chunks
    row = start // QUERY_TILES * QUERY_LEN
    tl.store(plan + o_indptr, 0)
    tl.store(plan + o_indptr + 1 + request, row + QUERY_LEN * chunks, mask=leads)
    if TENSOR_CORES:
        tl.store(plan + merge_indptr, 0)
        for token in range(QUERY_LEN):
            to = plan + merge_indptr + 1 + request * QUERY_LEN + token
            tl.store(to, row + (token + 1) * chunks, mask=leads)

    tile = tl.arange(0, BLOCK_T)
    valid = tile < tl.sum(chunks, 0)
    begins = tl.histogram(tl.where(inside, start, BLOCK_T - 1), BLOCK_T)
    owner = tl.where(valid, tl.cumsum(begins, 0) - 1, 0)
    kv_tile = tl.where(valid, tile - tl.gather(start, owner, 0), 0)
    in_grid = tile < padded_tiles
    tl.store(plan + request_indices + tile, owner // QUERY_TILES, mask=in_grid)
    tl.store(plan + kv_tile_indices + tile, kv_tile, mask=in_grid)
    if TENSOR_CORES:
        tl.store(plan + qo_tile_indices + tile, owner % QUERY_TILES, mask=in_grid)
    tl.store(plan_bytes + block_valid_mask + tile, valid.to(tl.uint8), mask=in_grid)


_replan_op = define_op(
    "builders::flashinfer_replan",
    "(Tensor seq_lens, Tensor(a!) last_page_len, Tensor(b!) workspace, int table_width, int[] layout) -> ()",
    cpu=_replan,
    cuda=_launch,
)
