"""A decoder layer of any attention and any feed-forward.

Legend: T tokens, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from attn_backends.kernels.rope import Rope
from spec_decode.model_api import Attention, KeepRows
from spec_decode.models.layers.feed_forward import FeedForward
from spec_decode.models.layers.grouped_attention import GroupedAttention
from spec_decode.models.layers.linear import ResidualStream
from spec_decode.models.layers.mla_attention import MlaAttention
from spec_decode.models.layers.moe import MixtureOfExperts
from spec_decode.models.layers.rms_norm import RMSNorm

if TYPE_CHECKING:
    from spec_decode.models.layers.delta_net import DeltaNet


class PreNormLayer(nn.Module):
    """Attention and feed-forward, each with a pre-norm and a residual."""

    def __init__(
        self,
        layer: int,
        attention_norm: RMSNorm | None,
        attention: MlaAttention | GroupedAttention | DeltaNet,
        mlp_norm: RMSNorm,
        mlp: FeedForward | MixtureOfExperts,
    ) -> None:
        """layer: its index among the draft's. attention_norm: None if attention reads what the draft made of its
        inputs."""
        super().__init__()
        self.layer = layer
        self.attention_norm, self.attention, self.mlp_norm, self.mlp = attention_norm, attention, mlp_norm, mlp

    def forward(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        rope: Rope,
        attention: Attention,
        keep: KeepRows | None = None,
    ) -> ResidualStream:
        """Run the layer on x and the pending delta, or what attention reads; returns x [T, H] for the kept rows."""
        if self.attention_norm is None:
            read = cast(torch.Tensor, delta)
        else:
            x, read = self.attention_norm(x, delta)
        delta = self.attention(read, rope, self.layer, attention, keep)
        x, normed = self.mlp_norm(x if keep is None else keep(x), delta)
        return self.mlp(normed, x), None
