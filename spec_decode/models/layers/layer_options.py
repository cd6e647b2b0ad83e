"""Llama-style decoder layers by their published tensors, and what these add to the house's own. Legend: T tokens, H
hidden size.

Checkpoints keep query, key and value apart, and gate and up; here each is one matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from spec_decode.models.attention import Attention
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.config import ModelConfig
from spec_decode.models.kernels.skinny_linear import skinny_linear
from spec_decode.models.layers.decoder_layer import DecoderLayer, ResidualStream
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.layers.rope import Rotary


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOptions:
    """What layers have beyond the weights of all: biases of query, key and value, one of the output, and norms of each
    query and key head."""

    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def found(cls, store: TensorStore, prefix: str) -> LayerOptions:
        """What the checkpoint has in the layer of that prefix."""
        names = store.names()
        return cls(
            qkv_bias=f"{prefix}self_attn.q_proj.bias" in names,
            out_bias=f"{prefix}self_attn.o_proj.bias" in names,
            qk_norm=f"{prefix}self_attn.q_norm.weight" in names,
        )


class PublishedLayer(DecoderLayer):
    """A decoder layer with extras. Without any it is the house's own, kernels for few rows included."""

    def __init__(self, config: ModelConfig, layer: int, extras: LayerOptions) -> None:
        super().__init__(config, layer)
        self.plain = extras == LayerOptions()
        if extras.qkv_bias:
            self.qkv = nn.Linear(self.qkv.in_features, self.qkv.out_features)
        if extras.out_bias:
            self.out = nn.Linear(self.out.in_features, self.out.out_features)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if extras.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if extras.qk_norm else None

    def attention(self, x: torch.Tensor, positions: torch.Tensor, rotary: Rotary, attention: Attention) -> torch.Tensor:
        packed = self.qkv(x)
        if self.q_norm is not None and self.k_norm is not None:
            query, key, value = packed.view(x.shape[0], -1, self.head_dim).split(self.heads, 1)
            packed = torch.cat([self.q_norm(query)[1], self.k_norm(key)[1], value], 1)
        delta: torch.Tensor = self.out(self._attended(packed, positions, rotary, attention))
        return delta

    def folded_attention(
        self, x: torch.Tensor, delta: torch.Tensor | None, positions: torch.Tensor, rotary: Rotary, attention: Attention
    ) -> ResidualStream:
        if self.plain:
            return super().folded_attention(x, delta, positions, rotary, attention)
        x, normed = self.attn_norm(x, delta)
        return x, self.attention(normed, positions, rotary, attention)

    def folded_attention_over(
        self, inputs: torch.Tensor, x: torch.Tensor, positions: torch.Tensor, rotary: Rotary, attention: Attention
    ) -> ResidualStream:
        """As `folded_attention`, with x as the residual and what queries, keys and values are made of as it is."""
        if not self.plain:
            return x, self.attention(inputs, positions, rotary, attention)
        attended = self._attended(skinny_linear(inputs, self.qkv.weight), positions, rotary, attention)
        return skinny_linear(attended, self.out.weight, residual=x), None
