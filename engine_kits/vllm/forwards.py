"""Attention in plain torch with vLLM's metadata, where a GPU would run vLLM's kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_backends import KVCache, check_forward_inputs
from attn_backends.base import Sinks
from attn_backends.kernels.latent_attention import latent_attention
from attn_backends.kernels.paged_attention import paged_attention
from attn_backends.kernels.sparse_attention import sparse_attention
from builders import AttentionSpec
from engine_kits.engine_cache import EngineCache, after_the_null_page, with_null_page


class PackedHeads(EngineCache):
    """Each head's keys and values adjacent, as vLLM packs them; for any kernel that reads pages and lengths."""

    def allocate_kv(self, spec: AttentionSpec, num_pages: int, device: torch.device) -> KVCache:
        shape = (num_pages + 1, spec.num_kv_heads, spec.page_size, 2 * spec.head_dim)
        both = torch.empty(shape, dtype=spec.cache_dtype, device=device).transpose(1, 2)
        return after_the_null_page(KVCache(*both.split(spec.head_dim, -1)))

    def forward(
        self, query: Tensor, cache: KVCache, metadata: Any, *, spec: AttentionSpec, sinks: Sinks = None
    ) -> Tensor:
        check_forward_inputs(query, cache, metadata, spec, sinks)
        blocks = with_null_page(cache)
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
            cache.key_scale,
            cache.value_scale,
        )


class Latents(EngineCache):
    """Dense latent attention with a decode's block table and lengths."""

    def forward(
        self, query: Tensor, cache: KVCache, metadata: Any, *, spec: AttentionSpec, sinks: Sinks = None
    ) -> Tensor:
        check_forward_inputs(query, cache, metadata, spec, sinks)
        return latent_attention(
            query,
            with_null_page(cache).latents,
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
            with_null_page(cache).latents,
            metadata.decode_swa_indices[:tokens, 0],
            metadata.decode_swa_lens[:tokens],
            sinks,
            spec.page_size,
            spec.softmax_scale,
            False,  # batch_invariant
        )
