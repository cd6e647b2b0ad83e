"""A cache whose first page belongs to padding, as engines have it: page p of the kit is page p + 1 of the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_backends import AttentionBackend, KVCache
from attn_backends.base import Sinks
from builders import AttentionSpec


class EngineCache(AttentionBackend):
    """The null page is NaN: a read of it shows."""

    def allocate_kv(self, spec: AttentionSpec, num_pages: int, device: torch.device) -> KVCache:
        return after_the_null_page(super().allocate_kv(spec, num_pages + 1, device))

    def write_kv(self, key: Tensor, value: Tensor, cache: KVCache, metadata: Any) -> None:
        super().write_kv(key, value, with_null_page(cache), metadata)


class NoAttention(EngineCache):
    """Nothing attends by the metadata."""

    def forward(
        self, query: Tensor, cache: KVCache, metadata: Any, *, spec: AttentionSpec, sinks: Sinks = None
    ) -> Tensor:
        """Raises NotImplementedError: the kit does not call it."""
        raise NotImplementedError("nothing attends by this metadata")


def with_null_page(cache: KVCache) -> KVCache:
    """The whole cache of the engine: the kit's pages, and the null page before them."""
    return KVCache(*map(_from_the_null_page, (cache.key, cache.value)))


def after_the_null_page(pages: KVCache) -> KVCache:
    """The kit's pages of an engine's cache, whose null page becomes NaN."""
    for part in (pages.key, pages.value):
        part[0].view(torch.uint8).fill_(0xFF)
    return KVCache(pages.key[1:], pages.value[1:])


def _from_the_null_page(pages: Tensor) -> Tensor:
    start = pages.storage_offset() - pages.stride(0)
    return pages.as_strided((pages.shape[0] + 1, *pages.shape[1:]), pages.stride(), start)
