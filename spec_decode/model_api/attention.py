"""The interface between a model's layers and attention or recurrent state: one record, one call."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from attn_backends import StateInputs
from attn_backends.kernels.rope import Rope, apply_rope
from attn_backends.kernels.write_latent import KvANormRope


class AttentionInputs(NamedTuple):
    """The attention inputs of one layer for T flat tokens. The layer knows nothing about caches or metadata.

    layer           index of the layer in its model
    query           [T, num_q_heads, head_dim]
    key             [T, num_kv_heads, head_dim]
    value           [T, num_kv_heads, value_dim]
    rope            rotation to apply to query and key first, possibly in place; None: they are already rotated
    kv_a_norm_rope  norms and rotates the key, a latent as projected, before it is cached; never together with rope
    sinks           fp32 [num_q_heads], or None
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rope: Rope | None = None
    kv_a_norm_rope: KvANormRope | None = None
    sinks: torch.Tensor | None = None

    def head(self, count: int) -> AttentionInputs:
        """Return those of the first `count` tokens."""
        rope, norm_rope = self.rope, self.kv_a_norm_rope
        return self._replace(
            query=self.query[:count],
            key=self.key[:count],
            value=self.value[:count],
            rope=rope and rope._replace(positions=rope.positions[:count]),
            kv_a_norm_rope=norm_rope and replace(norm_rope, positions=norm_rope.positions[:count]),
        )

    def normed_and_rotated(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key and value after norm and rotation, for unfused implementations; differentiable."""
        if self.rope is not None:
            return apply_rope(self.query, self.rope), apply_rope(self.key, self.rope), self.value
        if self.kv_a_norm_rope is None:
            return self.query, self.key, self.value
        latent = self.kv_a_norm_rope.apply(self.key)
        return self.query, latent, latent[..., : self.value.shape[-1]]


class ContextAttention(Protocol):
    """Stores keys and values of context tokens, which do not attend."""

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor, rope: Rope) -> None:
        """Store key [T, num_kv_heads, head_dim], after rotating it, and value [T, num_kv_heads, value_dim]."""
        ...


class Attention(Protocol):
    """Stores keys and values, and computes attention."""

    def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
        """Return [T, num_q_heads, value_dim]."""
        ...


class RecurrentAttention(Attention, Protocol):
    """Attention of a model that also has recurrent layers: keeps their states too."""

    def recur(self, layer: int, inputs: StateInputs) -> torch.Tensor:
        """Take in the tokens of a layer of a state group; return [T, num_value_heads, value_dim]."""
        ...
