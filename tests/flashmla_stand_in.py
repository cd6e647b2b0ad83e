"""FlashMLA's dense decode for machines without a GPU, in torch: it attends by its schedule, right or stale.

From deepseek-ai/FlashMLA at 9241ae3: api/dense_decode.h (checks, and how many parts a batch has),
get_decoding_sched_meta.cu (the blocks of a part), sm90/decode/dense/splitkv_mla.cuh (what a part computes) and
combine.cu. A part is one SM's work, a block is 64 tokens, and a split is one part's share of one request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch

from attn_backends import AttentionBackend
from tests.backends_over_stand_ins import loaded_over, stand_in_op

MODULE = "flash_mla.flash_mla_interface"
NUM_SMS = 8
_BLOCK, _ROWS, _OVERHEAD = 64, 64, 5


@dataclass
class FlashMLASchedMeta:
    """Empty until the first call; later calls use its schedule, even if lengths have changed."""

    have_initialized: bool = False
    config: Any = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    schedule, config = tile_scheduler_metadata, (*q.shape[:3], *k_cache.shape[1:3], causal)
    assert isinstance(schedule, FlashMLASchedMeta) and num_splits is None
    assert config == (schedule.config or config), "inputs are not those that the schedule was made for"
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    given = cache_seqlens, block_table, scale, causal, schedule.tile_scheduler_metadata, schedule.num_splits
    out, lse, *planned = dense_decode_fwd(q, k_cache, head_dim_v, *given)
    schedule.have_initialized, schedule.config = True, config
    schedule.tile_scheduler_metadata, schedule.num_splits = planned
    return out, lse


def dense_decode_fwd(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    head_dim_v: int,
    lens: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    causal: bool,
    parts: torch.Tensor | None,
    splits: torch.Tensor | None,
    out: None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The function that FlashMLA's Python calls. out: exists in vLLM's build."""
    _require("dtypes are bf16, and int32", q.dtype == k_cache.dtype == torch.bfloat16, _int32(lens, table))
    _require("dims are 576 and 512, in pages of 64", (q.shape[3], head_dim_v, k_cache.shape[1]) == (576, 512, _BLOCK))
    _require("last dims are contiguous", q.stride(3) == k_cache.stride(3) == table.stride(1) == 1)
    _require("lengths are contiguous", lens.is_contiguous(), len(lens) == len(table) == len(q) > 0)
    if parts is None or splits is None:
        parts, splits = plan(lens, max(NUM_SMS // -(-q.shape[1] * q.shape[2] // _ROWS), 1))
    attended = attend(q, k_cache, table, lens, parts, splits, scale, causal and q.shape[1] > 1)
    return (*attended, parts, splits)


def _require(what: str, *holds: bool) -> None:
    if not all(holds):
        raise RuntimeError(f"FlashMLA takes nothing else: {what}")


def _int32(*tensors: torch.Tensor) -> bool:
    return all(tensor.dtype is torch.int32 for tensor in tensors)


class Part(NamedTuple):
    """A part's blocks: from begin_block of begin_req to end_block (exclusive) of end_req (inclusive)."""

    begin_req: int
    end_req: int
    begin_block: int
    end_block: int
    begin_split: int
    first_is_split: bool
    last_is_split: bool


@stand_in_op("flashmla_stand_in::plan")
def plan(lens: torch.Tensor, num_parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = lens.tolist()
    last = [max(length - 1, 0) // _BLOCK for length in tokens]
    blocks = [block + 1 for block in last]
    payload = -(-sum(count + _OVERHEAD for count in blocks) // num_parts) + _OVERHEAD
    parts, splits = [], [0]
    req = block = split = 0
    for _ in range(num_parts):
        begin, left = (req, block, split), payload
        while req < len(tokens):
            remaining = blocks[req] - block
            if left < remaining + _OVERHEAD:
                if left > _OVERHEAD:
                    block, split = block + left - _OVERHEAD, split + 1
                break
            splits.append(splits[-1] + split + 1)
            left -= remaining + _OVERHEAD
            req, block, split = req + 1, 0, 0
        end_req = req if block else req - 1
        end_block = block or (last[end_req] + 1 if tokens[end_req] else 0)
        first_is_split, last_is_split = begin[1] > 0, end_block != last[end_req] + 1 and tokens[end_req] != 0
        if begin[0] == end_req:
            first_is_split = last_is_split = first_is_split or last_is_split
        parts.append(Part(begin[0], end_req, begin[1], end_block, begin[2], first_is_split, last_is_split))
    assert (req, block, split) == (len(tokens), 0, 0)
    return torch.tensor([[*part, 0] for part in parts], dtype=torch.int32), torch.tensor(splits, dtype=torch.int32)


@stand_in_op("flashmla_stand_in::attend")
def attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lens: torch.Tensor,
    parts: torch.Tensor,
    splits: torch.Tensor,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [B, S, H, 512] and lse fp32 [B, H, S]; what no part writes is NaN, as uninitialised memory can be."""
    (num_reqs, query_len, heads, _), first = query.shape, splits.tolist()
    out = query.new_full((num_reqs, query_len, heads, 512), math.nan)
    lse = torch.full((num_reqs, query_len, heads), math.nan)
    partial_out = torch.full((num_reqs + len(parts), query_len, heads, 512), math.nan)
    partial_lse = torch.full((num_reqs + len(parts), query_len, heads), math.nan)
    for part in (Part(*row[:7]) for row in parts.tolist()):
        for req in range(part.begin_req, min(part.end_req + 1, num_reqs)):
            begins, ends, length = req == part.begin_req, req == part.end_req, int(lens[req])
            start = part.begin_block if begins else 0
            end = part.end_block if ends else -(-length // _BLOCK)
            whole = not (part.first_is_split if begins else part.last_is_split if ends else False)
            found = _attend_to_blocks(query[req], cache, table[req], length, start, end, scale, causal)
            if whole:
                out[req], lse[req] = found[0].to(query.dtype), found[1]
            else:
                at = first[req] + (part.begin_split if begins else 0)
                partial_out[at], partial_lse[at] = found
    for req in range(num_reqs):
        its = slice(first[req], first[req + 1])
        if its.stop - its.start != 1:
            lse[req] = partial_lse[its].logsumexp(0)
            weights = (partial_lse[its] - lse[req].nan_to_num(neginf=0.0)).exp()
            out[req] = (weights[..., None] * partial_out[its]).sum(0).to(query.dtype)
    return out, lse.transpose(1, 2).contiguous()


def _attend_to_blocks(
    query: torch.Tensor,
    cache: torch.Tensor,
    pages: torch.Tensor,
    length: int,
    start: int,
    end: int,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with query tokens [S, H, 576] to blocks start to end of a request: 0 with an lse of -inf where none is."""
    at = torch.arange(start * _BLOCK, max(start, end) * _BLOCK)
    page = pages[(at // _BLOCK).clamp(max=len(pages) - 1)].long()
    live = at < length
    if bool((live & ((page < 0) | (page >= len(cache)))).any()):
        raise RuntimeError(f"illegal memory access: pages {page[live].tolist()} of {len(cache)}")
    latents = torch.where(live[:, None], cache[page.clamp(0, len(cache) - 1), at % _BLOCK, 0].float(), 0.0)
    behind = torch.arange(len(query) - 1, -1, -1) if causal else torch.zeros(len(query), dtype=torch.int64)
    seen = at < length - behind[:, None]
    scores = torch.einsum("shd,nd->shn", query.float(), latents) * scale
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return torch.einsum("shn,nd->shd", weights, latents[:, :512]), lse


@contextmanager
def installed() -> Iterator[AttentionBackend]:
    """Yield the backend flashmla over the stand-in, on the CPU; nothing stays loaded."""
    modules = {name: ModuleType(name) for name in (MODULE.partition(".")[0], MODULE)}
    vars(modules[MODULE]).update(
        __file__=__file__, FlashMLASchedMeta=FlashMLASchedMeta, flash_mla_with_kvcache=flash_mla_with_kvcache
    )
    with loaded_over(modules, "attn_backends.flashmla", "FlashMla") as backend:
        yield backend
