"""vLLM's KV cache as keys and values: views, never copies."""

from __future__ import annotations

import torch

from attn_backends import KVCache
from builders.errors import require


def keys_and_values(kv_cache: torch.Tensor, head_dim: int) -> KVCache:
    """Split kv_cache [pages, num_kv_heads, page_size, 2 * head_dim], in any memory order with a contiguous last dim,
    which holds a token's key, then its value.

    Raises BatchError for a cache of another layout.
    """
    require(
        kv_cache.dim() == 4 and kv_cache.shape[3] == 2 * head_dim and kv_cache.stride(3) == 1,
        f"vLLM's KV cache must be [pages, heads, page size, {2 * head_dim}] with a contiguous last dim, got "
        f"{list(kv_cache.shape)} with strides {kv_cache.stride()}; other values would be read as keys. Use a cache "
        "layout of a supported vLLM and an unquantised cache.",
    )
    key, value = kv_cache.transpose(1, 2).split(head_dim, -1)
    return KVCache(key, value)


def latents(kv_cache: torch.Tensor, head_dim: int, value_dim: int) -> KVCache:
    """View kv_cache [pages, page_size, head_dim], whose first value_dim dims are the values.

    Raises BatchError for a cache of another layout.
    """
    require(
        kv_cache.dim() == 3 and kv_cache.shape[2] == head_dim and kv_cache.stride(2) == 1,
        f"vLLM's latent cache must be [pages, page size, {head_dim}] with a contiguous last dim, got "
        f"{list(kv_cache.shape)} with strides {kv_cache.stride()}; other values would be read as latents. Use a cache "
        "layout of a supported vLLM and an unquantised cache.",
    )
    key = kv_cache[:, :, None]
    return KVCache(key, key[..., :value_dim])
