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

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_q_heads", "num_kv_heads", "head_dim")
        problems = [
            f"{name} must be at least 1, got {getattr(self, name)}"
            for name in (*sizes, "max_positions")
            if getattr(self, name) < 1
        ]
        if self.head_dim % 2:
            problems.append(f"head_dim must be even for rotary pairs, got {self.head_dim}")
        if not (self.norm_eps > 0 and self.rope_theta > 0 and self.num_layers >= 0):
            problems.append(
                f"norm_eps and rope_theta must be positive and num_layers 0 or more, got {self.norm_eps}, "
                f"{self.rope_theta} and {self.num_layers}"
            )
        if problems:
            raise ValueError("; ".join(problems))

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
