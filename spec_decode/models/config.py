"""Configuration of the model family of this library's own pair."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from builders import AttentionKind, AttentionSpec
from spec_decode.model_api import LayerGroup

_MAX_SIZE, MAX_LAYERS = 2**24, 1024
"""Above any real model. A larger number in a file is wrong, and must not make us allocate that much memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentConfig:
    """Attention over one latent per token, as in DeepSeek-V4, with low-rank queries and outputs.

    The last rope_dim dims of a latent and of every query head are rotated. value_dim: the value is the first value_dim
    dims of the latent, none of them rotated; None: the whole latent, including its rotated dims.
    """

    rope_dim: int
    q_rank: int
    out_rank: int
    value_dim: int | None = None
    sinks: bool = True
    """Whether each head has a learned sink logit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A Llama-style decoder. A draft has the target's vocabulary and hidden size."""

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
    norm_offset: float = 0.0
    """What checkpoints store is a norm's weight minus this."""
    softmax_scale: float | None = None
    """Factor on q.k; None: head_dim ** -0.5."""
    embedding_scale: float = 1.0
    """Factor on the embeddings that enter the first layer."""
    state_scale: float = 1.0
    """Factor that turns the states between layers into the published model's."""
    logits_divisor: float = 1.0
    logits_cap: float | None = None
    """c of logits that are c tanh(x / c); None: x."""
    sliding_window: int | None = None
    rotated_dims: int | None = None
    """Rotated dims of a head without a latent; None: all."""
    sinks: bool = False
    """Whether each head without a latent has a learned sink logit."""
    latent: LatentConfig | None = None
    """None: one key and one value per KV head."""

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_q_heads", "num_kv_heads", "head_dim")
        problems = [
            f"{name} must be at {'least 1' if size < 1 else f'most {_MAX_SIZE}'}, got {size}"
            for name in (*sizes, "max_positions")
            if not 1 <= (size := getattr(self, name)) <= _MAX_SIZE
        ]
        if self.num_q_heads * self.head_dim > _MAX_SIZE:
            dims = self.num_q_heads * self.head_dim
            problems.append(f"num_q_heads * head_dim must be at most {_MAX_SIZE}, got {dims}")
        if self.head_dim % 2:
            problems.append(f"head_dim must be even for rotary pairs, got {self.head_dim}")
        problems += [
            f"{name} must be positive and finite, got {scale}"
            for name in ("softmax_scale", "embedding_scale", "state_scale", "logits_divisor", "logits_cap")
            if (scale := getattr(self, name)) is not None and not 0 < scale < math.inf
        ]
        if not math.isfinite(self.norm_offset):
            problems.append(f"norm_offset must be finite, got {self.norm_offset}")
        if not (0 < self.norm_eps < math.inf and 0 < self.rope_theta < math.inf):
            problems.append(
                f"norm_eps and rope_theta must be positive and finite, got {self.norm_eps} and {self.rope_theta}"
            )
        if not 0 <= self.num_layers <= MAX_LAYERS:
            problems.append(f"num_layers must be 0 to {MAX_LAYERS}, got {self.num_layers}")
        problems += self._latent_problems()
        if problems:
            raise ValueError("; ".join(problems))

    def _latent_problems(self) -> list[str]:
        if (latent := self.latent) is None:
            return []
        problems = [
            f"latent.{name} must be at least 1, got {getattr(latent, name)}"
            for name in ("q_rank", "out_rank")
            if getattr(latent, name) < 1
        ]
        if self.num_kv_heads != 1:
            problems.append(f"all heads share one latent: num_kv_heads must be 1, got {self.num_kv_heads}")
        if not 2 <= latent.rope_dim <= self.head_dim or latent.rope_dim % 2:
            problems.append(f"latent.rope_dim must be even, 2 to head_dim {self.head_dim}, got {latent.rope_dim}")
        if not (self.value_dim == self.head_dim or 1 <= self.value_dim <= self.head_dim - latent.rope_dim):
            problems.append(
                f"latent.value_dim must be head_dim, or 1 to head_dim - rope_dim = {self.head_dim - latent.rope_dim}, "
                f"got {self.value_dim}"
            )
        return problems

    @property
    def value_dim(self) -> int:
        """Dims of a head's output."""
        return self.head_dim if self.latent is None or self.latent.value_dim is None else self.latent.value_dim

    @property
    def rotary_dim(self) -> int:
        """Rotated dims of a head."""
        return self.latent.rope_dim if self.latent is not None else self.rotated_dims or self.head_dim

    def attention_spec(self, page_size: int, dtype: torch.dtype) -> AttentionSpec:
        """Return the spec of every layer's attention, over a cache with this page size."""
        return AttentionSpec(
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            page_size=page_size,
            dtype=dtype,
            sliding_window=self.sliding_window,
            scale=self.softmax_scale,
            sinks=self.sinks if self.latent is None else self.latent.sinks,
            kind=AttentionKind.MHA if self.latent is None else AttentionKind.MLA,
        )

    def layer_groups(self, page_size: int, dtype: torch.dtype) -> list[LayerGroup]:
        """Return all layers in one group."""
        spec = self.attention_spec(page_size, dtype)
        return [LayerGroup(name="layers", spec=spec, layers=tuple(range(self.num_layers)))]
