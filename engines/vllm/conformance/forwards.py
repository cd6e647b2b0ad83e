"""Attention in plain torch over what vLLM's metadata says, where a GPU would run vLLM's kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_backends import AttentionBackend, KVCache, check_forward_inputs
from attn_backends.base import Sinks
from attn_backends.kernels.latent_attention import latent_attention
from attn_backends.kernels.paged_attention import paged_attention
from attn_backends.kernels.sparse_attention import sparse_attention
from builders import AttentionSpec
from engines.vllm.conformance.builder import with_null_block


class EngineCache(AttentionBackend):
    """A cache whose pages follow vLLM's null block, which is NaN: a read of it shows."""

    def allocate_kv(self, spec: AttentionSpec, num_pages: int, device: torch.device) -> KVCache:
        return _after_the_null_block(super().allocate_kv(spec, num_pages + 1, device))

    def write_kv(self, key: Tensor, value: Tensor, cache: KVCache, metadata: Any) -> None:
        super().write_kv(key, value, with_null_block(cache), metadata)


class NoAttention(EngineCache):
    """Nothing attends by the metadata."""

    def forward(
        self, query: Tensor, cache: KVCache, metadata: Any, *, spec: AttentionSpec, sinks: Sinks = None
    ) -> Tensor:
        """Raises NotImplementedError: the kit does not call it."""
        raise NotImplementedError("nothing attends by this metadata")


class PackedHeads(EngineCache):
    """Keys and values of a head side by side, as vLLM packs them; any kernel that goes by pages and lengths."""

    def allocate_kv(self, spec: AttentionSpec, num_pages: int, device: torch.device) -> KVCache:
        shape = (num_pages + 1, spec.num_kv_heads, spec.page_size, 2 * spec.head_dim)
        both = torch.empty(shape, dtype=spec.cache_dtype, device=device).transpose(1, 2)
        return _after_the_null_block(KVCache(*both.split(spec.head_dim, -1)))

    def forward(
        self, query: Tensor, cache: KVCache, metadata: Any, *, spec: AttentionSpec, sinks: Sinks = None
    ) -> Tensor:
        check_forward_inputs(query, cache, metadata, spec, sinks)
        blocks = with_null_block(cache)
        return paged_attention(
            query,
            blocks.key,
            blocks.value,
            metadata.block_table,
            metadata.seq_lens,
            metadata.query_start_loc,
            sinks,
            None,  # tree_masks
            metadata.max_query_len,
            metadata.max_seq_len,
            1,  # num_splits
            spec.softmax_scale,
            spec.sliding_window,
            spec.soft_cap,
            True,  # causal
            False,  # batch_invariant
        )


class Latents(EngineCache):
    """Dense latent attention by a decode's block table and lengths."""

    def forward(
        self, query: Tensor, cache: KVCache, metadata: Any, *, spec: AttentionSpec, sinks: Sinks = None
    ) -> Tensor:
        check_forward_inputs(query, cache, metadata, spec, sinks)
        return latent_attention(
            query,
            with_null_block(cache).latents,
            metadata.decode_block_table,
            metadata.decode_seq_lens,
            metadata.query_start_loc,
            None,  # tree_masks
            metadata.max_query_len,
            1,  # num_splits
            spec.out_dim,
            spec.softmax_scale,
            True,  # causal
            False,  # batch_invariant
        )


class WindowLists(EngineCache):
    """Latent attention over each token's list of slots."""

    def forward(
        self, query: Tensor, cache: KVCache, metadata: Any, *, spec: AttentionSpec, sinks: Sinks = None
    ) -> Tensor:
        check_forward_inputs(query, cache, metadata, spec, sinks)
        tokens = query.shape[0]
        return sparse_attention(
            query,
            with_null_block(cache).latents,
            metadata.decode_swa_indices[:tokens, 0],
            metadata.decode_swa_lens[:tokens],
            sinks,
            spec.page_size,
            spec.softmax_scale,
            False,  # batch_invariant
        )


def _after_the_null_block(blocks: KVCache) -> KVCache:
    for part in (blocks.key, blocks.value):
        part[0].view(torch.uint8).fill_(0xFF)
    return KVCache(blocks.key[1:], blocks.value[1:])
