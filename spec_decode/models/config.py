"""Shapes of the shipped model family."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from builders import AttentionSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A Llama-style decoder; a draft model has the target's vocabulary and hidden size."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    sliding_window: int | None = None

    def attention_spec(self, page_size: int, dtype: torch.dtype) -> AttentionSpec:
        """The attention of every layer of the model, over a cache with that page size."""
        return AttentionSpec(
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
            dtype=dtype,
            sliding_window=self.sliding_window,
        )
