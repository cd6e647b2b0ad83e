"""A cache whose first page belongs to padding, as in engines: page p of the kit is page p + 1 of the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_backends import AttentionBackend, KVCache
from attn_backends.base import Sinks
from builders import AttentionSpec


class EngineCache(AttentionBackend):
    """Fills the null page with NaN, so that a read of it shows."""

    def allocate_kv(self, spec: AttentionSpec, num_pages: int, device: torch.device) -> KVCache:
        return after_the_null_page(super().allocate_kv(spec, num_pages + 1, device))

    def write_kv(self, key: Tensor, value: Tensor, cache: KVCache, metadata: Any) -> None:
        super().write_kv(key, value, with_null_page(cache), metadata)


class NoAttention(EngineCache):
    """For metadata that nothing attends with."""

    def forward(
        self, query: Tensor, cache: KVCache, metadata: Any, *, spec: AttentionSpec, sinks: Sinks = None
    ) -> Tensor:
        """Raise NotImplementedError: the kit does not call it."""
        raise NotImplementedError("nothing attends by this metadata")


def with_null_page(cache: KVCache) -> KVCache:
    """Return the engine's whole cache: the null page, then the kit's pages."""
    return replace(cache, key=_from_the_null_page(cache.key), value=_from_the_null_page(cache.value))


def after_the_null_page(pages: KVCache) -> KVCache:
    """Return the kit's pages of an engine's cache, and fill the null page with NaN."""
    for part in (pages.key, pages.value):
        part[0].view(torch.uint8).fill_(0xFF)
    return replace(pages, key=pages.key[1:], value=pages.value[1:])


def _from_the_null_page(pages: Tensor) -> Tensor:
    start = pages.storage_offset() - pages.stride(0)
    return pages.as_strided((pages.shape[0] + 1, *pages.shape[1:]), pages.stride(), start)
