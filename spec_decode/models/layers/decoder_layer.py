"""The decoder layer that target and draft share. Legend: T tokens, H hidden size."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from spec_decode.models.attention import Attention, AttentionInputs
from spec_decode.models.config import ModelConfig
from spec_decode.models.kernels.skinny_linear import is_skinny, norm_linear, skinny_linear
from spec_decode.models.kernels.swiglu import swiglu
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.layers.rope import Rotary

ResidualStream = tuple[torch.Tensor, torch.Tensor | None]
"""Hidden states x and the delta yet to be added to them (None: nothing), both [T, H]."""


class ResidualLayer(nn.Module, ABC):
    """Attention and SwiGLU feed-forward, each with a pre-norm and a residual; the attention is a subclass's.

    Few rows without a gradient take kernels that fold norms, gate and residuals into the linear layers.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.add_attention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    @abstractmethod
    def add_attention(self, config: ModelConfig) -> None:
        """Create what `attention` needs."""

    @abstractmethod
    def attention(self, x: torch.Tensor, positions: torch.Tensor, rotary: Rotary, attention: Attention) -> torch.Tensor:
        """What attention makes of normed hidden states x [T, H] at positions int64 [T]: the residual's delta [T, H]."""

    def forward(
        self, x: torch.Tensor, delta: torch.Tensor | None, positions: torch.Tensor, rotary: Rotary, attention: Attention
    ) -> ResidualStream:
        """x and the delta yet to be added to it, [T, H], at positions int64 [T]; the same pair behind the layer."""
        if is_skinny(x, self.gate_up.weight):
            x, delta = self.folded_attention(x, delta, positions, rotary, attention)
        else:
            x, normed = self.attn_norm(x, delta)
            delta = self.attention(normed, positions, rotary, attention)
        return self.feed_forward(x, delta)

    def feed_forward(self, x: torch.Tensor, delta: torch.Tensor | None) -> ResidualStream:
        """The second half of `forward`, behind attention: the same pair as there."""
        x, activated = self._activated(x, delta)
        if is_skinny(x, self.gate_up.weight):
            return skinny_linear(activated, self.down.weight, residual=x), None
        return x, self.down(activated)

    def _activated(self, x: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """x + delta, and SwiGLU's hidden units of its norm."""
        norm = self.mlp_norm
        if is_skinny(x, self.gate_up.weight, gated=True):
            return norm_linear(x, delta, norm.weight, norm.eps, self.gate_up.weight, gated=True)
        x, normed = norm(x, delta)
        return x, swiglu(self.gate_up(normed))

    def folded_attention(
        self, x: torch.Tensor, delta: torch.Tensor | None, positions: torch.Tensor, rotary: Rotary, attention: Attention
    ) -> ResidualStream:
        """The first half of `forward`, for x that `is_skinny`; a subclass may fold its linear layers too."""
        x, normed = self.attn_norm(x, delta)
        return x, self.attention(normed, positions, rotary, attention)


class DecoderLayer(ResidualLayer):
    """Attention over a key and a value per KV head."""

    def add_attention(self, config: ModelConfig) -> None:
        self.heads = (config.num_q_heads, config.num_kv_heads, config.num_kv_heads)
        self.head_dim = config.head_dim
        self.qkv = nn.Linear(config.hidden_size, sum(self.heads) * config.head_dim, bias=False)
        self.out = nn.Linear(config.num_q_heads * config.head_dim, config.hidden_size, bias=False)

    def attention(self, x: torch.Tensor, positions: torch.Tensor, rotary: Rotary, attention: Attention) -> torch.Tensor:
        delta: torch.Tensor = self.out(self._attended(self.qkv(x), positions, rotary, attention))
        return delta

    def folded_attention(
        self, x: torch.Tensor, delta: torch.Tensor | None, positions: torch.Tensor, rotary: Rotary, attention: Attention
    ) -> ResidualStream:
        x, packed = norm_linear(x, delta, self.attn_norm.weight, self.attn_norm.eps, self.qkv.weight)
        attended = self._attended(packed, positions, rotary, attention)
        return skinny_linear(attended, self.out.weight, residual=x), None

    def _attended(
        self, packed: torch.Tensor, positions: torch.Tensor, rotary: Rotary, attention: Attention
    ) -> torch.Tensor:
        """What the heads attend to, [T, heads * D], for packed [T, (heads + 2 KV heads) * D] queries, keys, values."""
        packed = packed.view(packed.shape[0], sum(self.heads), self.head_dim)
        query, key, value = packed.split(self.heads, 1)
        return attention(AttentionInputs(self.layer, query, key, value, rope=rotary(positions))).flatten(1)
