"""Cache writes fused with the layer's steps before them: a backend declares those it has, and inherits them from here.

A backend without one still serves such layers: its caller runs the steps one by one, then `write_kv`.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_backends.kernels.rope import Rope
from attn_backends.kernels.rope_and_write_kv import rope_and_write_kv
from attn_backends.kernels.write_latent import KvANormRope
from attn_backends.kv_cache import KVCache


class FusedRopeWrite:
    """Implements `FusedWrite.ROPE`."""

    def rope_and_write_kv(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rope: Rope, cache: KVCache, metadata: Any
    ) -> None:
        """Rotate query in place, and store the rotated key and the value at metadata.slot_mapping, in one kernel.

        query  [num_tokens, num_q_heads, head_dim]
        key    [num_tokens, num_kv_heads, head_dim], value [..., value_dim], in spec.new_kv_dtype
        """
        rope_and_write_kv(query, key, value, rope, cache.key, cache.value, metadata.slot_mapping, cache.both_scales)


class FusedLatentWrite:
    """Implements `FusedWrite.KV_A_NORM_ROPE`."""

    def norm_rope_and_write_latent(
        self, latent: torch.Tensor, norm_rope: KvANormRope, cache: KVCache, metadata: Any
    ) -> None:
        """Norm and rotate latent [num_tokens, head_dim], in spec.new_kv_dtype, and store it, in one kernel."""
        cache.layout.write_latent(latent, cache, metadata.slot_mapping, norm_rope)
