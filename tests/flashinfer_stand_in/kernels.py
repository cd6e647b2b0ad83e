"""FlashInfer's paged kernels in torch: each CTA attends to what its entries in the plan say, right or wrong.

From decode.cuh, prefill.cuh and cascade.cuh (include/flashinfer/attention) and page.cuh of FlashInfer 0.6.12; a CTA
here stands for the CTAs of all its KV heads. Lengths are uint32 and wrap as there. What a test could not survive is a
RuntimeError: running for 2**32 tokens, and access to unowned memory. Partial outputs that no CTA writes are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tests.backends_over_stand_ins import stand_in_op
from tests.builders.flashinfer.host_planner import ceil_div
from tests.flashinfer_stand_in.planning import PlanInfo

_WRAP = 2**32
_LOWEST = -5e4
"""The infinity of math.cuh."""
_ENDLESS = 2**20
_LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class _Cta:
    """Query rows and a run of KV tokens. token, head and row are int64 [rows]."""

    request: int
    start: int
    end: int
    query_len: int
    kv_len: int
    position: torch.Tensor
    """Each row's query token, counted from the request's first."""
    token: torch.Tensor
    """The same, counted from the batch's first."""
    head: torch.Tensor
    """Each row's query head, counted from the first that shares its KV head."""
    row: torch.Tensor
    """Output row of each."""


class _Pages:
    """paged_kv_t of page.cuh."""

    def __init__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
    ) -> None:
        self.key, self.value, self.indices = key, value, indices
        self.indptr, self.last_page_len = indptr.tolist(), last_page_len.tolist()

    def length(self, request: int) -> int:
        pages = self.indptr[request + 1] - self.indptr[request]
        return ((pages - 1) * self.key.shape[1] + self.last_page_len[request]) % _WRAP if pages else 0

    def tokens(self, request: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, fp32 [end - start, num_kv_heads, head_dim]."""
        if end - start > _ENDLESS:
            raise RuntimeError(f"would not end: {end - start} tokens of request {request}")
        size = self.key.shape[1]
        at = self.indptr[request] * size + torch.arange(start, end, device="cpu")
        entry, offset = at // size, at % size
        # Like the kernels, which read page 0's first token past all requests' pages.
        known = entry < self.indptr[-1]
        page = torch.where(known, self.indices[torch.where(known, entry, 0)], 0).long()
        offset = torch.where(known, offset, 0)
        if ((page < 0) | (page >= len(self.key))).any():
            raise RuntimeError(f"illegal memory access: pages {page.tolist()} of {len(self.key)}")
        return self.key[page, offset].float(), self.value[page, offset].float()


@stand_in_op("flashinfer_stand_in::attend", mutates=("partials", "out", "lse"))
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    qo_indptr: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    last_page_len: torch.Tensor,
    plan: torch.Tensor,
    partials: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    plan_info: Sequence[int],
    causal: bool,
    window_left: int,
    soft_cap: float,
    scale: float,
) -> None:
    info = PlanInfo.of(plan_info)
    pages = _Pages(key, value, kv_indptr, kv_indices, last_page_len)
    group = query.shape[1] // key.shape[2]
    targets, weights = _partials(info, partials, out) if info.split else (out, lse)
    if qo_indptr is None:
        tile_tokens = cuda_core_tile_tokens(query.shape[2], group, key.element_size())
        ctas = _cuda_core_ctas(info, plan, pages, group, tile_tokens)
    else:
        ctas = _tensor_core_ctas(info, plan, pages, group, qo_indptr.tolist(), window_left)
    by_group = query.float().unflatten(1, (-1, group))
    for cta in ctas:
        if len(cta.row) and int(cta.row.max()) >= len(targets):
            raise RuntimeError(f"illegal memory access: output row {int(cta.row.max())} of {len(targets)}")
        keys, values = pages.tokens(cta.request, cta.start, cta.end)
        seen = _visible(cta, causal, window_left)
        found, weight = _softmax(by_group[cta.token, :, cta.head], keys, values, seen, soft_cap, scale)
        targets.unflatten(1, (-1, group))[cta.row, :, cta.head] = found.to(out.dtype)
        weights.unflatten(1, (-1, group))[cta.row, :, cta.head] = weight
    if info.split:
        _merge(targets, weights, _merge_indptr(info, plan, len(last_page_len)), out, lse)


def _ints(plan: torch.Tensor, offset: int, length: int) -> list[int]:
    values: list[int] = plan.view(torch.int32)[offset // 4 : offset // 4 + length].tolist()
    return values


def _partials(info: PlanInfo, partials: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return partial outputs [rows, num_q_heads, head_dim], in the output's dtype, and log2 of their weights."""
    heads, dim = out.shape[1:]
    v_bytes, s_bytes = info.partial_bytes(heads, dim)
    outputs = partials[info.v : info.v + v_bytes].view(out.dtype).view(-1, heads, dim)
    weights = partials[info.s : info.s + s_bytes].view(torch.float32).view(-1, heads)
    return outputs.fill_(float("nan")), weights.fill_(float("nan"))


def _tiles(info: PlanInfo, plan: torch.Tensor) -> list[int]:
    if not (info.split and info.graph):
        return list(range(info.padded_tiles))
    mask = plan[info.block_valid_mask : info.block_valid_mask + info.padded_tiles].tolist()
    return [tile for tile, valid in enumerate(mask) if valid]


def cuda_core_tile_tokens(head_dim: int, group: int, element_size: int) -> int:
    """Return KV tokens per iteration of the CUDA-core kernel: BatchDecodeWithPagedKVCacheDispatched in decode.cuh."""
    per_row = head_dim // max(16 // element_size, head_dim // 32)
    rows = max(128, per_row * group) // (per_row * group)
    return (4 if group == 1 else 1) * group * rows


def _cuda_core_ctas(info: PlanInfo, plan: torch.Tensor, pages: _Pages, group: int, tile_tokens: int) -> Iterator[_Cta]:
    requests = _ints(plan, info.request_indices, info.padded_tiles)
    kv_tiles = _ints(plan, info.kv_tile_indices, info.padded_tiles)
    chunk = _ints(plan, info.kv_chunk_size, 1)[0]
    for tile in _tiles(info, plan):
        request, kv_tile = requests[tile], kv_tiles[tile]
        kv_len = pages.length(request)
        start = kv_tile * chunk if info.split else 0
        end = min((kv_tile + 1) * chunk, kv_len) if info.split else kv_len
        # The iteration count is uint32 arithmetic too: a little past the end it rounds up to 0.
        iterations = ((end - start) % _WRAP + tile_tokens - 1) % _WRAP // tile_tokens
        if iterations * tile_tokens > _ENDLESS:
            raise RuntimeError(f"would not end: a chunk of request {request} starts at {start} of {kv_len} tokens")
        zeros = torch.zeros(group, dtype=torch.int64, device="cpu")
        yield _Cta(
            request=request,
            start=start,
            end=max(start, end),
            query_len=1,
            kv_len=kv_len,
            position=zeros,
            token=zeros + request,
            head=torch.arange(group, device="cpu"),
            row=zeros + tile,
        )


def _tensor_core_ctas(
    info: PlanInfo, plan: torch.Tensor, pages: _Pages, group: int, qo_indptr: list[int], window_left: int
) -> Iterator[_Cta]:
    requests = _ints(plan, info.request_indices, info.padded_tiles)
    q_tiles = _ints(plan, info.qo_tile_indices, info.padded_tiles)
    kv_tiles = _ints(plan, info.kv_tile_indices, info.padded_tiles)
    o_indptr = _ints(plan, info.o_indptr, len(qo_indptr))
    chunk = _ints(plan, info.kv_chunk_size, 1)[0]
    for tile in _tiles(info, plan):
        request, q_tile, kv_tile = requests[tile], q_tiles[tile], kv_tiles[tile]
        first, query_len = qo_indptr[request], qo_indptr[request + 1] - qo_indptr[request]
        kv_len = pages.length(request)
        window = window_left if window_left >= 0 else kv_len
        leftmost = max(kv_len + q_tile * info.query_tile // group - (query_len + window), 0)
        packed = torch.arange(
            q_tile * info.query_tile, min((q_tile + 1) * info.query_tile, query_len * group), device="cpu"
        )
        position = packed // group
        # The kernel counts a token's chunks by the length on the device, the plan by the length it was made for.
        chunks = ceil_div(min(max(kv_len, 1), window + info.query_tile), chunk) if info.split else 1
        yield _Cta(
            request=request,
            start=min(kv_tile * chunk + leftmost, kv_len) if info.split else leftmost,
            end=min((kv_tile + 1) * chunk + leftmost, kv_len) if info.split else kv_len,
            query_len=query_len,
            kv_len=kv_len,
            position=position,
            token=first + position,
            head=packed % group,
            row=o_indptr[request] + position * chunks + (kv_tile if info.split else 0),
        )


def _visible(cta: _Cta, causal: bool, window_left: int) -> torch.Tensor:
    """Bool [rows, tokens]."""
    token, position = torch.arange(cta.start, cta.end, device="cpu"), cta.position[:, None]
    seen = torch.ones(len(position), len(token), dtype=torch.bool, device="cpu")
    if causal:
        seen &= token + cta.query_len <= cta.kv_len + position
    if window_left >= 0:
        seen &= token + cta.query_len + window_left >= cta.kv_len + position
    return seen


def _softmax(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    soft_cap: float,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [rows, num_kv_heads, head_dim] of query rows over these tokens, and log2 of its weight."""
    scores = torch.einsum("rhd,nhd->rhn", query, key) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = torch.where(seen[:, None], scores * _LOG2E, _LOWEST)
    # The state starts with a weight of 1 at the lowest score.
    scores = torch.cat([scores.new_full((*scores.shape[:2], 1), _LOWEST), scores], -1)
    peak = scores.amax(-1)
    weights = torch.exp2(scores - peak[..., None])
    total = weights.sum(-1)
    found = torch.einsum("rhn,nhd->rhd", weights[..., 1:], value) / total[..., None]
    return torch.where((peak == _LOWEST)[..., None], 0.0, found), total.log2() + peak


def _merge_indptr(info: PlanInfo, plan: torch.Tensor, num_reqs: int) -> list[int]:
    """Return where each output row's partial outputs start."""
    if not info.tensor_cores:
        return _ints(plan, info.o_indptr, num_reqs + 1)
    rows = _ints(plan, info.total_rows_at, 1)[0] if info.graph else info.total_rows
    return _ints(plan, info.merge_indptr, rows + 1)


def _merge(
    partial: torch.Tensor, weight: torch.Tensor, indptr: list[int], out: torch.Tensor, lse: torch.Tensor
) -> None:
    counts = torch.tensor(indptr, device="cpu").diff()
    if (counts < 0).any() or indptr[-1] > len(partial):
        raise RuntimeError(f"illegal memory access: merges {indptr} of {len(partial)} partial outputs")
    owner = torch.arange(len(counts), device="cpu").repeat_interleave(counts)
    partial, weight = partial[indptr[0] : indptr[-1]].float(), weight[indptr[0] : indptr[-1]]
    peak = partial.new_full((len(counts), out.shape[1]), _LOWEST)
    peak.scatter_reduce_(0, owner[:, None].expand_as(weight), weight, "amax")
    share = torch.exp2(weight - peak[owner])
    total = torch.zeros_like(peak).index_add_(0, owner, share)
    merged = partial.new_zeros(len(counts), *out.shape[1:]).index_add_(0, owner, partial * share[..., None])
    out[: len(counts)] = torch.where((counts == 0)[:, None, None], 0.0, merged / total[..., None])
    lse[: len(counts)] = torch.where((counts == 0)[:, None], _LOWEST, peak + total.log2())
