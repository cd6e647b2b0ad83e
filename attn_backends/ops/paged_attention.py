"""Causal attention over a paged cache: one kernel for decode and extend, split over KV tokens, and the merge.

Shape legend: T query tokens, R requests, H query heads, K KV heads, G = H / K query heads a KV head, D head dim,
E value dim, S splits, M rows of a tile (query token x head of the group), N KV tokens of a block.
"""

from __future__ import annotations

import math

import torch

from builders._ops import define_op
from builders._triton import interpreting, tl, triton

_LOG2E = math.log2(math.e)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    max_query_len: int,
    num_splits: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of query [T, H, D] over caches [pages, page_size, K, D or E]; returns [T, H, E] in query's dtype.

    Request r's queries are rows query_start_loc[r] .. query_start_loc[r + 1] - 1 (int32 [R + 1]), the last of them at
    position seq_lens[r] - 1 (int32 [R]). block_table int32 [R, max_pages] is read only below seq_lens. Rows of a
    request with seq_len 0 come out as 0. max_query_len and num_splits size the launch: both are capture constants.
    """
    out: torch.Tensor = _paged_attention_op(
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        query_start_loc,
        max_query_len,
        num_splits,
        scale,
        sliding_window or 0,
        soft_cap or 0.0,
        sinks,
    )
    return out


def _paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    num_splits: int,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    if interpreting():
        return _launch(
            query,
            key_cache,
            value_cache,
            block_table,
            seq_lens,
            query_start_loc,
            max_query_len,
            num_splits,
            scale,
            sliding_window,
            soft_cap,
            sinks,
        )
    out = query.new_zeros(*query.shape[:2], value_cache.shape[3])
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    for request, length in enumerate(lens):
        first, last = starts[request], starts[request + 1]
        if length and last > first:
            out[first:last] = _attend_one(
                query[first:last].float(),
                _tokens(key_cache, block_table[request], length),
                _tokens(value_cache, block_table[request], length),
                scale,
                sliding_window,
                soft_cap,
                sinks,
            ).to(query.dtype)
    return out


def _tokens(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` cached tokens of a request, fp32 [K, length, D]."""
    count = -(-length // cache.shape[1])
    return cache[pages[:count].long()].flatten(0, 1)[:length].transpose(0, 1).float()


def _attend_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """query fp32 [q, H, D], key [K, length, D], value [K, length, E]; fp32 [q, H, E]."""
    count, heads, dim = query.shape
    kv_heads, length, _ = key.shape
    grouped = query.view(count, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    scores = torch.matmul(grouped, key[:, None].transpose(2, 3)) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    position = torch.arange(length - count, length)[:, None]
    token = torch.arange(length)[None]
    hidden = token > position
    if sliding_window:
        hidden |= token <= position - sliding_window
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        sink = sinks.view(kv_heads, heads // kv_heads, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.matmul(weights, value[:, None]).permute(2, 0, 1, 3).reshape(count, heads, -1)


def _shape(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, *rest: object) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], value_cache.shape[3])


def _launch(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    num_splits: int,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    tokens, heads, dim = query.shape
    _, page_size, kv_heads, value_dim = value_cache.shape
    group = heads // kv_heads
    query = query if query.stride(2) == 1 else query.contiguous()
    interpreted = query.device.type == "cpu"
    # The interpreter truncates fp32 to bf16 where the hardware rounds: let torch do that conversion.
    out_dtype = torch.float32 if interpreted else query.dtype
    out = torch.empty(tokens, heads, value_dim, dtype=out_dtype, device=query.device)
    split = num_splits > 1
    partial = torch.empty(num_splits, tokens, heads, value_dim, device=query.device) if split else out
    lse = torch.empty(num_splits, tokens, heads, device=query.device) if split else out
    block_m = max(16, min(64, triton.next_power_of_2(max_query_len * group)))
    tiles = triton.cdiv(max_query_len * group, block_m)
    config = _tile_config(dim, value_dim, query.element_size(), block_m)
    _attention_kernel[(seq_lens.shape[0] * tiles, kv_heads, num_splits)](
        query,
        key_cache,
        value_cache,
        partial,
        lse,
        sinks,
        block_table,
        seq_lens,
        query_start_loc,
        scale,
        soft_cap,
        tiles,
        tokens,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
        HEADS=heads,
        GROUP=group,
        PAGE_SIZE=page_size,
        DIM=dim,
        VALUE_DIM=value_dim,
        BLOCK_D=triton.next_power_of_2(dim),
        BLOCK_E=triton.next_power_of_2(value_dim),
        BLOCK_M=block_m,
        SPLITS=num_splits,
        WINDOW=sliding_window,
        SOFT_CAP=soft_cap > 0,
        SINKS=sinks is not None and not split,
        FP32_DOT=interpreted,
        **config,
    )
    if split:
        _merge_kernel[(tokens, heads)](
            partial,
            lse,
            sinks,
            out,
            tokens,
            HEADS=heads,
            VALUE_DIM=value_dim,
            BLOCK_E=triton.next_power_of_2(value_dim),
            SPLITS=num_splits,
            BLOCK_S=triton.next_power_of_2(num_splits),
            SINKS=sinks is not None,
            num_warps=2,
        )
    return out.to(query.dtype)


def _tile_config(dim: int, value_dim: int, element_size: int, block_m: int) -> dict[str, int]:
    """Block of KV tokens, warps and pipeline stages that keep the loads of a tile in flight (tuned on an H200)."""
    row_bytes = (triton.next_power_of_2(dim) + triton.next_power_of_2(value_dim)) * element_size
    block_n = 64 if row_bytes <= 512 else 32 if row_bytes <= 1024 else 16
    stages = 3 if block_n * row_bytes * 3 <= 160 * 1024 else 2
    return {"BLOCK_N": block_n, "num_warps": 4, "num_stages": stages}


@triton.jit
def _attention_kernel(
    query,
    key_cache,
    value_cache,
    out,
    lse,
    sinks,
    block_table,
    seq_lens,
    query_start_loc,
    scale,
    soft_cap,
    tiles,
    tokens,
    q_token_stride,
    q_head_stride,
    k_page_stride,
    k_token_stride,
    k_head_stride,
    v_page_stride,
    v_token_stride,
    v_head_stride,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    FP32_DOT: tl.constexpr,
):
    request = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    first = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - first
    if tile * BLOCK_M >= query_len * GROUP:
        return
    seq_len = tl.load(seq_lens + request)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_row = row < query_len * GROUP
    token = (first + row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    position = seq_len - query_len + row // GROUP
    dim = tl.arange(0, BLOCK_D)
    edim = tl.arange(0, BLOCK_E)

    # A padding row has no keys: its range is empty and its output is 0.
    last_row = tl.minimum(tile * BLOCK_M + BLOCK_M, query_len * GROUP) - 1
    end = tl.where(seq_len > 0, seq_len - query_len + last_row // GROUP + 1, 0)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(seq_len - query_len + (tile * BLOCK_M) // GROUP - WINDOW + 1, 0)
    first_block = start // BLOCK_N
    blocks = tl.cdiv(end, BLOCK_N) - first_block
    share = tl.cdiv(blocks, SPLITS)
    lo = first_block + split * share
    hi = tl.minimum(lo + share, first_block + blocks)

    q = tl.load(
        query + token[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :],
        mask=in_row[:, None] & (dim[None, :] < DIM),
        other=0.0,
    )
    if FP32_DOT:
        q = q.to(tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    table = block_table + request.to(tl.int64) * table_stride
    for block in range(lo, hi):
        kv = block * BLOCK_N + tl.arange(0, BLOCK_N)
        owned = kv < end
        page = tl.load(table + kv // PAGE_SIZE, mask=owned, other=0).to(tl.int64)
        k = tl.load(
            key_cache
            + (page * k_page_stride + (kv % PAGE_SIZE) * k_token_stride + kv_head * k_head_stride)[None, :]
            + dim[:, None],
            mask=owned[None, :] & (dim[:, None] < DIM),
            other=0.0,
        )
        v = tl.load(
            value_cache
            + (page * v_page_stride + (kv % PAGE_SIZE) * v_token_stride + kv_head * v_head_stride)[:, None]
            + edim[None, :],
            mask=owned[:, None] & (edim[None, :] < VALUE_DIM),
            other=0.0,
        )
        if FP32_DOT:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if SOFT_CAP:
            ratio = tl.exp2(-2.8853900817779268 * tl.abs(scores / soft_cap))
            scores = soft_cap * tl.where(scores >= 0, 1.0, -1.0) * (1.0 - ratio) / (1.0 + ratio)
        scores = scores * 1.4426950408889634
        seen = kv[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (kv[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - safe_peak[:, None])
        fade = tl.exp2(peak - safe_peak)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = new_peak

    if SINKS:
        sink = tl.load(sinks + head, mask=in_row, other=0.0) * 1.4426950408889634
        new_peak = tl.maximum(peak, sink)
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.exp2(sink - new_peak)
        acc = acc * fade[:, None]
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    at = (split.to(tl.int64) * tokens + token) * HEADS + head
    tl.store(
        out + at[:, None] * VALUE_DIM + edim[None, :],
        acc.to(out.dtype.element_ty),
        mask=in_row[:, None] & (edim[None, :] < VALUE_DIM),
    )
    if SPLITS > 1:
        tl.store(lse + at, tl.where(total > 0, peak + tl.log2(total), float("-inf")), mask=in_row)


@triton.jit
def _merge_kernel(
    partial,
    lse,
    sinks,
    out,
    tokens,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SINKS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, BLOCK_S)
    edim = tl.arange(0, BLOCK_E)
    at = (split.to(tl.int64) * tokens + token) * HEADS + head
    part = tl.load(lse + at, mask=split < SPLITS, other=float("-inf"))
    peak = tl.max(part, 0)
    if SINKS:
        sink = tl.load(sinks + head) * 1.4426950408889634
        peak = tl.maximum(peak, sink)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp2(part - peak)
    total = tl.sum(weight, 0)
    if SINKS:
        total += tl.exp2(sink - peak)
    rows = tl.load(
        partial + at[:, None] * VALUE_DIM + edim[None, :],
        mask=(part > float("-inf"))[:, None] & (edim[None, :] < VALUE_DIM),
        other=0.0,
    )
    merged = tl.sum(rows * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    to = out + (token * HEADS + head) * VALUE_DIM + edim
    tl.store(to, merged.to(out.dtype.element_ty), mask=edim < VALUE_DIM)


_paged_attention_op = define_op(
    "attn_backends::paged_attention",
    "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, Tensor query_start_loc, "
    "int max_query_len, int num_splits, float scale, int sliding_window, float soft_cap, Tensor? sinks) -> Tensor",
    cpu=_paged_attention,
    cuda=_launch,
    fake=_shape,
)
