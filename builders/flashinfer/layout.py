"""Where FlashInfer keeps a plan: the arrays of its int workspace, found from the plan info that plan() leaves behind.

The plan info has the order of DecodePlanInfo and PrefillPlanInfo in include/flashinfer/attention/scheduler.cuh of
FlashInfer 0.6.12, unchanged in 0.7.2. plan.py defines the terms for the parts of a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from builders.errors import require
from builders.spec import AttentionSpec

_MIN_CHUNK_TOKENS = 128
_ALL_PAGES = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanLayout:
    """Where one wrapper's plan lies in its int workspace, and the constants it is computed from.

    The fields named like plan arrays are offsets in int32 elements, except block_valid_mask, which is in bytes.
    """

    num_reqs: int
    page_size: int
    tensor_cores: bool
    split: bool
    """Whether requests are cut into chunks. If not, the plan does not depend on the lengths."""
    padded_tiles: int
    """CTAs of the grid's first axis, for any lengths."""
    tile_budget: int
    """The chunk size is the smallest that needs at most this many tiles."""
    request_indices: int
    """Array [padded_tiles]: the request of each tile."""
    kv_tile_indices: int
    """Array [padded_tiles]: the chunk of each tile."""
    o_indptr: int
    """Array [num_reqs + 1]: where the partial outputs of each request start, one row per query token and chunk."""
    kv_chunk_size: int
    """One int: tokens per chunk."""
    block_valid_mask: int
    """Bytes [padded_tiles]: whether the CTA has a tile."""
    qo_tile_indices: int = 0
    """Array [padded_tiles]: the query tile of each tile. Tensor cores only."""
    merge_indptr: int = 0
    """Array [num_reqs * query_len + 1]: o_indptr by query token. Tensor cores only."""
    query_len: int = 1
    query_tiles: int = 1
    """Query tiles per request: its query_len tokens times the heads of a group, in tiles that FlashInfer sizes."""
    window_pages: int = _ALL_PAGES
    """Maximum pages of a request that are planned: those that its sliding window can reach."""

    @classmethod
    def of_cuda_cores(cls, plan_info: Sequence[int], *, num_reqs: int, page_size: int) -> PlanLayout:
        """Read the plan info of a decode wrapper with use_tensor_cores=False, planned with use_cuda_graph=True.

        This kernel's planner ignores sliding windows: it cuts the whole request. Raises BatchError for plan info of
        another kernel, another FlashInfer release or another batch size.
        """
        info = _checked(plan_info, length=10, graph_flag=8)
        padded, split = info[0], bool(info[9])
        require(
            padded >= num_reqs if split else padded == num_reqs,
            f"a plan for {num_reqs} requests needs {'at least' if split else 'exactly'} {num_reqs} tiles, got "
            f"{padded}; its arrays would overflow. Plan with the batch size that will run.",
        )
        return cls(
            num_reqs=num_reqs,
            page_size=page_size,
            tensor_cores=False,
            split=split,
            padded_tiles=padded,
            tile_budget=padded,
            block_valid_mask=info[6],
            **_elements(request_indices=info[3], kv_tile_indices=info[4], o_indptr=info[5], kv_chunk_size=info[7]),
        )

    @classmethod
    def of_tensor_cores(
        cls, plan_info: Sequence[int], spec: AttentionSpec, *, num_reqs: int, num_sms: int, query_len: int = 1
    ) -> PlanLayout:
        """Read the plan info of FA2: a decode wrapper with use_tensor_cores=True, or a prefill wrapper.

        It must be planned with use_cuda_graph=True for num_reqs requests of query_len tokens each, for this spec, on a
        device with num_sms SMs. Raises BatchError for plan info of another kernel, FlashInfer release or batch, for a
        plan without splits (disable_split_kv), and as `planned_pages` does.
        """
        info = _checked(plan_info, length=15, graph_flag=13)
        padded, rows, query_tile = info[0], info[1], info[3]
        require(
            bool(info[14]),
            "a plan recomputed on the device must split the KV tokens, got split_kv off; no mask would stop its "
            "padding tiles. Plan without disable_split_kv and fixed_split_size.",
        )
        require(
            rows == num_reqs * query_len,
            f"the plan must be for {num_reqs} requests of {query_len} query tokens, got one for {rows} tokens; its "
            "arrays would overflow. Plan with the batch that will run.",
        )
        budget = 2 * num_sms // spec.num_kv_heads
        query_tiles = -(-query_len * spec.group_size // query_tile)
        needed = max(budget, num_reqs * query_tiles)
        require(
            padded >= needed,
            f"{num_reqs} requests of {query_tiles} query tiles and {spec.num_kv_heads} KV heads on {num_sms} SMs need "
            f"a plan of at least {needed} tiles, got {padded}; its arrays would overflow. Pass the heads and device of "
            "the plan.",
        )
        return cls(
            num_reqs=num_reqs,
            page_size=spec.page_size,
            tensor_cores=True,
            split=True,
            padded_tiles=padded,
            tile_budget=budget,
            **_elements(request_indices=info[4], qo_tile_indices=info[5], kv_tile_indices=info[6]),
            **_elements(merge_indptr=info[7], o_indptr=info[8], kv_chunk_size=info[9]),
            block_valid_mask=info[12],
            query_len=query_len,
            query_tiles=query_tiles,
            window_pages=planned_pages(spec, query_len=query_len, query_tile=query_tile),
        )

    @property
    def min_chunk_pages(self) -> int:
        return max(_MIN_CHUNK_TOKENS // self.page_size, 1)

    @property
    def arrays(self) -> dict[str, tuple[int, int]]:
        """Offset and length of every int32 array that replan writes, by name."""
        tiles = self.padded_tiles
        names = {"request_indices": tiles, "kv_tile_indices": tiles, "o_indptr": self.num_reqs + 1}
        if self.split:
            names["kv_chunk_size"] = 1
        if self.tensor_cores:
            names |= {"qo_tile_indices": tiles, "merge_indptr": self.num_reqs * self.query_len + 1}
        return {name: (getattr(self, name), length) for name, length in names.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of the int workspace up to the end of the plan."""
        ends = [4 * (offset + length) for offset, length in self.arrays.values()]
        return max([*ends, self.block_valid_mask + self.padded_tiles if self.split else 0])


def planned_pages(spec: AttentionSpec, *, query_len: int, query_tile: int, max_seq_len: int = _ALL_PAGES) -> int:
    """Return the maximum pages of a request that FA2 plans: those that a window and one query tile can reach.

    Raises BatchError if a row of query_len tokens sees more, because it has a window, is not causal and exceeds a tile.
    """
    if spec.sliding_window is None:
        return _ALL_PAGES
    pages = -(-(spec.window_left + query_tile) // spec.page_size)
    seen = min(spec.window_left + query_len, max_seq_len)
    require(
        spec.causal or pages * spec.page_size >= seen,
        f"a block of {query_len} tokens and its window take {seen} KV tokens, FlashInfer plans {pages} pages of "
        f"{spec.page_size}; the last tokens would be omitted. Draft fewer tokens.",
    )
    return pages


def _checked(plan_info: Sequence[int], *, length: int, graph_flag: int) -> list[int]:
    info = [int(value) for value in plan_info]
    require(
        len(info) == length,
        f"plan info for this kernel has {length} values in FlashInfer 0.6.12 to 0.7.2, got {len(info)}; their meaning "
        "is unknown. Use one of these releases, and the right kernel's layout.",
    )
    require(
        bool(info[graph_flag]),
        "the plan must be made in CUDA-graph mode, got one whose grid follows the lengths; a replay would run the old "
        "grid over a new plan. Construct the wrapper with use_cuda_graph=True.",
    )
    return info


def _elements(**offsets: int) -> dict[str, int]:
    require(
        not any(offset % 4 for offset in offsets.values()),
        f"int32 arrays start at multiples of 4 bytes, got offsets {offsets}; the plan info has an unknown layout. Use "
        "FlashInfer 0.6.12 to 0.7.2.",
    )
    return {name: offset // 4 for name, offset in offsets.items()}
