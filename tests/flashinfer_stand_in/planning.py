"""plan(): the host planners' arrays in the int workspace, and the offsets at which the kernels find them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.builders.flashinfer.host_planner import Arena, HostPlan, ceil_div, cta_tile_q, first_chunk_that_fits

_INDICES = ("request_indices", "qo_tile_indices", "kv_tile_indices", "o_indptr")
_DECODE = (
    *("padded_tiles", "v", "s", "request_indices", "kv_tile_indices", "o_indptr", "block_valid_mask"),
    *("kv_chunk_size", "graph", "split"),
)
_PREFILL = (
    *("padded_tiles", "total_rows", "total_rows_at", "query_tile", *_INDICES[:3], "merge_indptr", "o_indptr"),
    *("kv_chunk_size", "v", "s", "block_valid_mask", "graph", "split"),
)
"""Names of the values in plan()'s list, in order."""


@dataclass(frozen=True, kw_only=True)
class PlanInfo:
    """DecodePlanInfo and PrefillPlanInfo of scheduler.cuh, which plan() returns as a list; offsets are in bytes."""

    padded_tiles: int
    request_indices: int
    kv_tile_indices: int
    o_indptr: int
    kv_chunk_size: int
    v: int
    s: int
    block_valid_mask: int
    graph: bool
    split: bool
    total_rows: int = 0
    total_rows_at: int = 0
    query_tile: int = 1
    qo_tile_indices: int = 0
    merge_indptr: int = 0
    tensor_cores: bool = False

    @classmethod
    def of(cls, info: Sequence[int]) -> PlanInfo:
        tensor_cores = len(info) == len(_PREFILL)
        fields = dict(zip(_PREFILL if tensor_cores else _DECODE, info, strict=True))
        return cls(**fields, tensor_cores=tensor_cores)  # type: ignore[arg-type]

    def partial_bytes(self, num_q_heads: int, head_dim: int) -> tuple[int, int]:
        """Return bytes of the partial outputs and of their weights: a float each, even if stored in another dtype."""
        rows = num_q_heads * self.padded_tiles * self.query_tile
        return rows * head_dim * 4, rows * 4


def write_plan(
    plan: HostPlan,
    workspace: torch.Tensor,
    pinned: torch.Tensor,
    partials: torch.Tensor,
    *,
    num_q_heads: int,
    head_dim: int,
    num_rows: int = 0,
) -> None:
    """Write through the pinned buffer, including its gaps; reject workspaces as FlashInfer's allocator does.

    num_rows: query tokens, which FA2 keeps in the plan in CUDA-graph mode.
    """
    info = PlanInfo.of(plan.info)
    needed = info.s + info.partial_bytes(num_q_heads, head_dim)[1] if info.split else 0
    for name, size, buffer in (("float", needed, partials), ("int", plan.num_bytes, workspace)):
        if size > buffer.numel():
            raise RuntimeError(f"Buffer overflow: the {name} workspace must hold {size} bytes, it has {buffer.numel()}")
    ints = pinned.view(torch.int32)
    for name, values in plan.arrays.items():
        offset = getattr(info, name)
        if name == "block_valid_mask":
            pinned[offset : offset + len(values)] = torch.tensor(values, dtype=torch.uint8, device="cpu")
        else:
            ints[offset // 4 : offset // 4 + len(values)] = torch.tensor(values, dtype=torch.int32, device="cpu")
    if info.tensor_cores and info.graph:
        ints[info.total_rows_at // 4] = num_rows
    workspace[: plan.num_bytes].copy_(pinned[: plan.num_bytes])


def plan_once(
    pages: Sequence[int],
    query_lens: Sequence[int],
    *,
    page_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_sms: int,
    window_left: int,
) -> HostPlan:
    """Run PrefillPlan without CUDA-graph mode: for these exact lengths, with a grid of the existing tiles."""
    group, budget = num_q_heads // num_kv_heads, 2 * num_sms // num_kv_heads
    query_tile = cta_tile_q(sum(query_lens) * group // len(query_lens), head_dim)
    within = ceil_div(window_left + query_tile, page_size)
    reached = [max(1, min(within, count) if window_left >= 0 else count) for count in pages]
    tiles_q = [ceil_div(length * group, query_tile) for length in query_lens]
    chunk = first_chunk_that_fits(
        max(128 // page_size, 1),
        max(reached),
        lambda mid: sum(q * ceil_div(count, mid) for q, count in zip(tiles_q, reached, strict=True)) <= budget,
    )
    split = chunk < max(reached)
    chunks = [ceil_div(count, chunk) for count in reached]
    tiles = [
        (request, q_tile, kv_tile)
        for request, count in enumerate(chunks)
        for q_tile in range(tiles_q[request])
        for kv_tile in range(count)
    ]
    arrays = {
        "request_indices": [tile[0] for tile in tiles],
        "qo_tile_indices": [tile[1] for tile in tiles],
        "kv_tile_indices": [tile[2] for tile in tiles],
        "o_indptr": _from_zero([length * count for length, count in zip(query_lens, chunks, strict=True)]),
        "kv_chunk_size": [chunk * page_size],
    }
    if split:
        per_token = [count for length, count in zip(query_lens, chunks, strict=True) for _ in range(length)]
        arrays["merge_indptr"] = _from_zero(per_token)
        arrays["block_valid_mask"] = [1] * len(tiles)
    return _laid_out(arrays, sum(query_lens), query_tile, num_q_heads, head_dim)


def _laid_out(
    arrays: dict[str, list[int]], num_rows: int, query_tile: int, num_q_heads: int, head_dim: int
) -> HostPlan:
    ints, floats, num_tiles = Arena(), Arena(), len(arrays["request_indices"])
    at = {name: ints.take(4 * len(arrays[name])) for name in _INDICES}
    at["kv_chunk_size"] = ints.take(4, 1)
    if split := "merge_indptr" in arrays:
        rows = num_q_heads * num_tiles * query_tile
        at["v"], at["s"] = floats.take(rows * head_dim * 4), floats.take(rows * 4)
        at["merge_indptr"] = ints.take(4 * len(arrays["merge_indptr"]))
        at["block_valid_mask"] = ints.take(num_tiles)
    known = {"padded_tiles": num_tiles, "total_rows": num_rows, "query_tile": query_tile, "split": int(split), **at}
    return HostPlan([known.get(name, 0) for name in _PREFILL], arrays, ints.used)


def _from_zero(counts: Sequence[int]) -> list[int]:
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    return ends
