"""FlashInfer's host planners in plain Python: what plan() writes to the int workspace in CUDA-graph mode, and where.

From scheduler.cuh and allocator.h (include/flashinfer) of FlashInfer 0.6.12, function by function and loop by loop:
BatchDecodeWithPagedKVCacheWorkEstimationDispatched and DecodePlan for the CUDA-core decode kernel,
PrefillSplitQOKVIndptr and PrefillPlan for FA2, on a device of compute capability 8 or more. `Case` is a batch on which
a replan is compared with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from builders.flashinfer.layout import PlanLayout
from builders.flashinfer.plan import replan
from tests.factories import make_spec

NUM_SMS = 132
UNTOUCHED = 0xAB
"""Bytes of the int workspace that no plan has written."""


@dataclass
class HostPlan:
    info: list[int]
    """plan()'s return value."""
    arrays: dict[str, list[int]]
    """By read_plan's names; indices only of existing tiles."""
    num_bytes: int
    """Int workspace used."""

    @property
    def num_tiles(self) -> int:
        return len(self.arrays["request_indices"])


class Arena:
    """Allocates aligned offsets one after another."""

    def __init__(self) -> None:
        self.used = 0

    def take(self, size: int, alignment: int = 16) -> int:
        offset = ceil_div(self.used, alignment) * alignment
        self.used = offset + size
        return offset


def ceil_div(x: int, y: int) -> int:
    return (x + y - 1) // y


def first_chunk_that_fits(low: int, high: int, fits: Callable[[int], bool]) -> int:
    while low < high:
        mid = (low + high) // 2
        if fits(mid):
            high = mid
        else:
            low = mid + 1
    return low


def plan_cuda_cores(
    pages: Sequence[int], *, page_size: int, num_q_heads: int, num_kv_heads: int, head_dim: int, max_grid_size: int
) -> HostPlan:
    """pages: of each request. max_grid_size: CTAs that fit on the device at once, which depends on the kernel."""
    split = len(pages) * num_kv_heads < max_grid_size
    if split:
        chunk = first_chunk_that_fits(
            max(128 // page_size, 1),
            max(pages),
            lambda mid: sum(ceil_div(count, mid) for count in pages) * num_kv_heads <= max_grid_size,
        )
    else:
        chunk = max(1, *pages)
    padded = max_grid_size // num_kv_heads if split else len(pages)
    requests, kv_tiles, o_indptr = [], [], [0]
    for request, count in enumerate(pages):
        chunks = ceil_div(max(count, 1), chunk)
        requests += [request] * chunks
        kv_tiles += range(chunks)
        o_indptr.append(o_indptr[-1] + chunks)
    arrays = {"request_indices": requests, "kv_tile_indices": kv_tiles, "o_indptr": o_indptr}

    ints, floats = Arena(), Arena()
    request_at, kv_tile_at = ints.take(4 * padded), ints.take(4 * padded)
    o_indptr_at = ints.take(4 * (padded + 1))
    chunk_at = ints.take(4, 1)
    v_at = s_at = mask_at = 0
    if split:
        v_at, s_at = floats.take(num_q_heads * padded * head_dim * 4), floats.take(num_q_heads * padded * 4)
        mask_at = ints.take(padded)
        arrays["kv_chunk_size"] = [chunk * page_size]
        arrays["block_valid_mask"] = [int(tile < len(requests)) for tile in range(padded)]
    info = [padded, v_at, s_at, request_at, kv_tile_at, o_indptr_at, mask_at, chunk_at, 1, int(split)]
    return HostPlan(info, arrays, ints.used)


def cta_tile_q(packed_len: int, head_dim: int) -> int:
    if packed_len > 64 and head_dim < 256:
        return 128
    return 64 if packed_len > 16 else 16


def plan_tensor_cores(
    pages: Sequence[int],
    query_lens: Sequence[int],
    *,
    page_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_sms: int,
    window_left: int = -1,
) -> HostPlan:
    batch, rows, group = len(pages), sum(query_lens), num_q_heads // num_kv_heads
    budget = 2 * num_sms // num_kv_heads
    query_tile = cta_tile_q((rows - batch + 1) * group, head_dim)
    padded = max(budget, ceil_div(rows * group, query_tile) + batch - 1)
    window_pages = ceil_div(window_left + query_tile, page_size)
    reached = [min(window_pages, count) if window_left >= 0 else count for count in pages]
    tiles_q = [ceil_div(length * group, query_tile) for length in query_lens]
    chunk = first_chunk_that_fits(
        max(128 // page_size, 1),
        max(1, *reached),
        lambda mid: sum(q * ceil_div(max(count, 1), mid) for q, count in zip(tiles_q, reached, strict=True)) <= budget,
    )
    requests, q_tiles, kv_tiles, merge_indptr, o_indptr = [], [], [], [0], [0]
    for request, (length, count) in enumerate(zip(query_lens, reached, strict=True)):
        chunks = ceil_div(max(count, 1), chunk)
        for q_tile in range(tiles_q[request]):
            requests += [request] * chunks
            q_tiles += [q_tile] * chunks
            kv_tiles += range(chunks)
        for _ in range(length):
            merge_indptr.append(merge_indptr[-1] + chunks)
        o_indptr.append(o_indptr[-1] + length * chunks)

    ints, floats = Arena(), Arena()
    request_at, q_tile_at, kv_tile_at = (ints.take(4 * padded) for _ in range(3))
    o_indptr_at = ints.take(4 * (batch + 1))
    chunk_at = ints.take(4, 1)
    rows_at = ints.take(4)
    v_at = floats.take(num_q_heads * padded * query_tile * head_dim * 4)
    s_at = floats.take(num_q_heads * padded * query_tile * 4)
    merge_at = ints.take(4 * (rows + 1))
    mask_at = ints.take(padded)
    arrays = {
        "request_indices": requests,
        "qo_tile_indices": q_tiles,
        "kv_tile_indices": kv_tiles,
        "o_indptr": o_indptr,
        "merge_indptr": merge_indptr,
        "kv_chunk_size": [chunk * page_size],
        "block_valid_mask": [int(tile < len(requests)) for tile in range(padded)],
    }
    places = [request_at, q_tile_at, kv_tile_at, merge_at, o_indptr_at, chunk_at, v_at, s_at, mask_at]
    return HostPlan([padded, rows, rows_at, query_tile, *places, 1, 1], arrays, ints.used)


def read_plan(workspace: torch.Tensor, layout: PlanLayout) -> dict[str, list[int]]:
    """Return the plan in an int workspace as lists by array name, without padding tiles; waits for the device."""
    host = workspace.cpu()
    ints = host.view(torch.int32)
    plan = {name: ints[offset : offset + length].tolist() for name, (offset, length) in layout.arrays.items()}
    if not layout.split:
        return plan
    mask = host[layout.block_valid_mask :][: layout.padded_tiles].tolist()
    tiles = sum(mask)
    trimmed = {name: values[:tiles] if name.endswith("indices") else values for name, values in plan.items()}
    return {**trimmed, "block_valid_mask": mask}


@dataclass(frozen=True)
class Case:
    """A batch and its kernel; `grid` matters for the CUDA-core kernel, query_len and window_left for FA2."""

    seq_lens: list[int]
    page_size: int = 16
    num_kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    grid: int = 5 * NUM_SMS
    """CTAs that fit on the device at once."""
    query_len: int = 1
    window_left: int = -1
    tensor_cores: bool = False

    @property
    def num_reqs(self) -> int:
        return len(self.seq_lens)

    @property
    def pages(self) -> list[int]:
        return [ceil_div(length, self.page_size) for length in self.seq_lens]

    @property
    def row_stride(self) -> int:
        return max(1, *self.pages) + 3

    def host_plan(self, pages: list[int] | None = None) -> HostPlan:
        heads = {
            "page_size": self.page_size,
            "num_q_heads": self.num_kv_heads * self.group,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
        }
        if self.tensor_cores:
            query_lens = [self.query_len] * self.num_reqs
            return plan_tensor_cores(
                pages or self.pages, query_lens, num_sms=NUM_SMS, window_left=self.window_left, **heads
            )
        return plan_cuda_cores(pages or self.pages, max_grid_size=self.grid, **heads)

    def first_plan(self) -> HostPlan:
        """Return the plan that fixes the layout, for unrelated lengths."""
        return self.host_plan([3] * self.num_reqs)

    def layout(self) -> PlanLayout:
        info = self.first_plan().info
        if not self.tensor_cores:
            return PlanLayout.of_cuda_cores(info, num_reqs=self.num_reqs, page_size=self.page_size)
        spec = make_spec(
            num_q_heads=self.num_kv_heads * self.group,
            num_kv_heads=self.num_kv_heads,
            page_size=self.page_size,
            sliding_window=None if self.window_left < 0 else self.window_left + 1,
        )
        return PlanLayout.of_tensor_cores(info, spec, num_reqs=self.num_reqs, num_sms=NUM_SMS, query_len=self.query_len)

    def workspace(self) -> torch.Tensor:
        """Return the workspace as the first plan leaves it."""
        host, layout = self.first_plan(), self.layout()
        workspace = torch.full((host.num_bytes // 4 * 4 + 64,), UNTOUCHED, dtype=torch.uint8)
        for name, (offset, _) in layout.arrays.items():
            values = torch.tensor(host.arrays[name], dtype=torch.int32)
            workspace.view(torch.int32)[offset : offset + len(values)] = values
        return workspace

    def replanned(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the int workspace and last_page_len after the replan."""
        layout, workspace = self.layout(), self.workspace()
        last_page_len = torch.full((self.num_reqs,), -77, dtype=torch.int32)
        seq_lens = torch.tensor(self.seq_lens, dtype=torch.int32)
        replan(seq_lens, last_page_len, workspace, layout, row_stride=self.row_stride)
        return workspace, last_page_len

    def plan(self) -> dict[str, list[int]]:
        return read_plan(self.replanned()[0], self.layout())
