"""A batch with a few tokens per request over shuffled pages, and any backend's attention over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from attn_backends import FP8_DS_MLA, AttentionBackend, KVCache, KVScales, cache_layout
from benchmarks.rows import BenchRow
from builders import AttentionKind, AttentionSpec, BatchBuffers, MetadataBuilder, RequestTables

AttentionCall = Callable[[KVCache], torch.Tensor]
"""Attention of a fixture's query over one of its caches."""

COLD_BYTES = 256 << 20
"""Total size of caches used in turn, so that timing measures memory and not the L2 cache."""


def shuffled_tables(page_size: int, num_reqs: int, limit: int, device: torch.device) -> tuple[RequestTables, int]:
    """Return tables for requests of `limit` tokens each over pages in random order, and the number of pages."""
    each = -(-limit // page_size)
    num_pages = num_reqs * each
    tables = RequestTables(
        page_sizes=[page_size], num_pages=[num_pages], max_reqs=num_reqs, max_seq_len=limit, device=device
    )
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).view(num_reqs, each)
    tables.load([order.tolist()], [limit] * num_reqs)
    return tables, num_pages


class DecodeFixture:
    """The query of each request is the last `tokens` of its `context` tokens; pages reach `horizon` tokens further."""

    def __init__(
        self,
        spec: AttentionSpec,
        num_reqs: int,
        context: int,
        device: torch.device,
        *,
        tokens: int = 1,
        horizon: int = 0,
    ) -> None:
        self.spec, self.num_reqs, self.context, self.device = spec, num_reqs, context, device
        self.tables, self.num_pages = shuffled_tables(spec.page_size, num_reqs, context + horizon, device)
        count = num_reqs * tokens
        self.buffers = BatchBuffers(self.tables, max_tokens=count)
        self.buffers.load([tokens] * num_reqs, [context] * num_reqs)
        self.batch = self.buffers.view(0, num_reqs=num_reqs, num_tokens=count, max_query_len=tokens)
        self.query = torch.randn(count, spec.num_q_heads, spec.head_dim, device=device).to(spec.dtype)
        self.sinks = torch.randn(spec.num_q_heads, device=device) if spec.sinks else None

    @property
    def kv_bytes(self) -> int:
        """Bytes that attention must read of a cache."""
        seen = min(self.context, self.spec.sliding_window or self.context)
        return self.num_reqs * seen * token_bytes(self.spec)

    def labels(self, case: str, backend: str) -> BenchRow:
        """Return the columns that identify a row; num_tokens only if a request has several."""
        shape = {"num_reqs": self.num_reqs, "context": self.context}
        tokens = self.batch.max_query_len
        several = {"num_tokens": tokens} if tokens > 1 else {}
        return {"case": case, "backend": backend, "spec": self.spec.describe(), **shape, **several}

    def builder(self, backend: AttentionBackend) -> MetadataBuilder[Any]:
        """Make a builder of the backend for this batch."""
        sizes = {"max_reqs": self.num_reqs, "max_tokens": len(self.query), "max_seq_len": self.tables.max_seq_len}
        return backend.builder(self.spec, self.device, **sizes)

    def attention_by(self, backend: AttentionBackend) -> AttentionCall:
        """Return the backend's attention, with metadata built for the batch as it is now."""
        metadata = self.builder(backend).build(self.batch)
        return lambda cache: backend.forward(self.query, cache, metadata, spec=self.spec, sinks=self.sinks)

    def caches(self, backend: AttentionBackend, *, cold: bool) -> list[KVCache]:
        """Return caches in the backend's layout: one, which stays in L2; if cold, enough that none is in L2 at its
        turn."""
        return [self._filled(backend) for _ in range(max(1, -(-COLD_BYTES // self.kv_bytes)) if cold else 1)]

    def _filled(self, backend: AttentionBackend) -> KVCache:
        spec = self.spec
        cache = replace(backend.allocate_kv(spec, self.num_pages, self.device), scales=KVScales.ones(spec, self.device))
        if cache_layout(spec) is not FP8_DS_MLA:
            cache.key.normal_()
            if not cache.latent:
                cache.value.normal_()
            return cache
        slots = torch.arange(self.num_pages * spec.page_size, device=self.device)
        latents = torch.randn(len(slots), 1, spec.head_dim, device=self.device).to(spec.new_kv_dtype)
        backend.write_kv(latents, latents, cache, SimpleNamespace(slot_mapping=slots))
        return cache


def token_bytes(spec: AttentionSpec) -> int:
    """Return the cache bytes of one token."""
    key_dim, value_dim, dtype = cache_layout(spec).token(spec)
    values = 0 if spec.kind is AttentionKind.MLA else value_dim
    return spec.num_kv_heads * (key_dim + values) * dtype.itemsize
