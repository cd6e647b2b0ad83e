"""vLLM's KV cache as keys and values: views, never copies."""

from __future__ import annotations

from typing import Any

import torch

from attn_backends import KVCache, KVScales
from builders.errors import require


def scales_of(layer: Any) -> KVScales:
    """Return a layer's scales: vLLM's own tensors, which a later load of weights updates in place."""
    return KVScales(layer._k_scale.view(1), layer._v_scale.view(1), (layer._k_scale_float,), (layer._v_scale_float,))


def keys_and_values(kv_cache: torch.Tensor, head_dim: int, scales: KVScales | None = None) -> KVCache:
    """Split kv_cache [pages, num_kv_heads, page_size, 2 * head_dim], in any memory order with a contiguous last dim,
    which holds a token's key, then its value. scales: of a cache in 8 bits, which vLLM allocates as uint8.

    Raises BatchError for a cache of another layout.
    """
    require(
        kv_cache.dim() == 4 and kv_cache.shape[3] == 2 * head_dim and kv_cache.stride(3) == 1,
        f"vLLM's KV cache must be [pages, heads, page size, {2 * head_dim}] with a contiguous last dim, got "
        f"{list(kv_cache.shape)} with strides {kv_cache.stride()}; other values would be read as keys. Use a cache "
        "layout of a supported vLLM and an unquantised cache.",
    )
    stored = kv_cache if scales is None else kv_cache.view(torch.float8_e4m3fn)
    key, value = stored.transpose(1, 2).split(head_dim, -1)
    return KVCache(key, value, scales)


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
