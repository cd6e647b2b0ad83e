"""Single kernels: the fused advance, and paged decode beside a peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from attn_backends import KVCache, get
from builders import AttentionSpec, BatchBuffers, RequestTables, advance_shared_state
from spec_decode.bench.measure import time_kernels

_PAGE = 16


def advance_rows(device: torch.device, bandwidth: float | None) -> Iterator[dict[str, Any]]:
    """GPU time of one fused advance of all groups."""
    for num_groups in (1, 4):
        for num_reqs in (1, 32, 256):
            tables = RequestTables(
                page_sizes=[_PAGE] * num_groups,
                num_pages=[num_reqs * 64] * num_groups,
                max_reqs=num_reqs,
                max_seq_len=1024,
                device=device,
            )
            pages = [list(range(r * 64, r * 64 + 64)) for r in range(num_reqs)]
            tables.load([pages] * num_groups, [1024] * num_reqs)
            buffers = BatchBuffers(tables, max_tokens=num_reqs)
            buffers.load([1] * num_reqs, [300] * num_reqs)
            launch = _advance_of(buffers, num_reqs)
            yield {
                "case": f"advance/{num_groups}-groups",
                "backend": "shared",
                "num_reqs": num_reqs,
                "context": 300,
                "gpu_us": time_kernels(launch),
                "kernels_per_step": 1,
            }


def _advance_of(buffers: BatchBuffers, num_reqs: int) -> Callable[[], None]:
    return lambda: advance_shared_state(buffers, num_reqs)


def decode_rows(device: torch.device, bandwidth: float | None) -> Iterator[dict[str, Any]]:
    """Paged decode of bf16, 32 query and 8 KV heads, dim 128, page 16, beside FlashAttention-3 where installed."""
    spec = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, page_size=_PAGE, dtype=torch.bfloat16)
    for num_reqs in (1, 32):
        for context in (1024, 8192):
            yield from _decode_at(spec, num_reqs, context, device, bandwidth)


def _decode_at(
    spec: AttentionSpec, num_reqs: int, context: int, device: torch.device, bandwidth: float | None
) -> Iterator[dict[str, Any]]:
    backend = get("triton_paged")
    each = context // _PAGE
    needed = num_reqs * context * 2 * spec.num_kv_heads * spec.head_dim * 2
    # Several caches in turn, so that what is timed is memory and not the L2 cache.
    copies = max(1, -(-(256 << 20) // needed))
    caches = [backend.allocate_kv(spec, num_reqs * each, device) for _ in range(copies)]
    for cache in caches:
        cache.key.normal_()
        cache.value.normal_()
    tables = RequestTables(
        page_sizes=[_PAGE], num_pages=[num_reqs * each], max_reqs=num_reqs, max_seq_len=context, device=device
    )
    order = torch.randperm(num_reqs * each, generator=torch.Generator().manual_seed(0)).view(num_reqs, each)
    tables.load([order.tolist()], [context] * num_reqs)
    buffers = BatchBuffers(tables, max_tokens=num_reqs)
    buffers.load([1] * num_reqs, [context] * num_reqs)
    builder = backend.builder(spec, device, max_reqs=num_reqs, max_tokens=num_reqs, max_seq_len=context)
    metadata = builder.build(buffers.view(0, num_reqs=num_reqs, num_tokens=num_reqs, max_query_len=1))
    query = torch.randn(num_reqs, spec.num_q_heads, spec.head_dim, device=device, dtype=spec.dtype)
    floor = needed / bandwidth if bandwidth else None

    def row(name: str, attend: Callable[[KVCache], object]) -> dict[str, Any]:
        gpu = time_kernels(lambda: [attend(cache) for cache in caches], calls=10)
        each_us = {key: round(value / copies, 3) for key, value in gpu.items()}
        return {
            "case": "paged-decode",
            "backend": name,
            "num_reqs": num_reqs,
            "context": context,
            "gpu_us": each_us,
            "floor_us": floor and round(floor, 3),
            "share_of_bandwidth": floor and round(floor / each_us["p50"], 4),
        }

    yield row("triton_paged", lambda cache: backend.forward(query, cache, metadata, spec=spec))
    if (peer := _flash_attn3()) is not None:
        lens, starts = buffers.seq_lens, buffers.query_start_loc
        yield row(
            "flash_attn3 (peer)",
            lambda cache: peer(
                q=query,
                k=cache.key,
                v=cache.value,
                max_seqlen_q=1,
                cu_seqlens_q=starts,
                max_seqlen_k=context,
                seqused_k=lens,
                causal=True,
                block_table=tables.block_tables[0],
                fa_version=3,
                num_splits=32,
            ),
        )


def _flash_attn3() -> Callable[..., Any] | None:
    """The peer, when this machine has it; it is a yardstick here, not a backend."""
    try:
        from vllm.vllm_flash_attn.flash_attn_interface import (  # type: ignore[import-not-found]
            flash_attn_varlen_func,
        )
    except ImportError:
        return None
    found: Callable[..., Any] = flash_attn_varlen_func
    return found
