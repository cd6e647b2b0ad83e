"""A decoder layer with latent attention, as DeepSeek-V4's multi-token-prediction layer has it.

Legend: T tokens, H hidden size, D head_dim, E value_dim. Sparse sliding-window MLA: one latent per token is the key of
every head, and its first E dims are the value. Values that hold rotated dims carry the rotation of their own position;
rotating the output back by the query's leaves the difference of the two, which is all that a position may mean.
"""

from __future__ import annotations

import torch
from torch import nn

from attn_backends.kernels.latent_rotary import inverse_rotary, prepare_query
from attn_backends.kernels.rope import Rope
from attn_backends.kernels.write_latent import KvANormRope
from spec_decode.models.attention import Attention, AttentionInputs
from spec_decode.models.base import KeepRows
from spec_decode.models.config import ModelConfig
from spec_decode.models.kernels.linear import linear
from spec_decode.models.layers.decoder_layer import ResidualLayer
from spec_decode.models.layers.linear import ResidualStream
from spec_decode.models.layers.rms_norm import RMSNorm


class LatentDecoderLayer(ResidualLayer):
    """Attention over one latent per token, with low-rank queries and outputs."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        assert config.latent is not None
        hidden, heads, dim, eps = config.hidden_size, config.num_q_heads, config.head_dim, config.norm_eps
        q_rank, out_rank = config.latent.q_rank, config.latent.out_rank
        self.heads, self.head_dim, self.value_dim = heads, dim, config.value_dim
        self.q_a = nn.Linear(hidden, q_rank, bias=False)
        self.q_norm = RMSNorm(q_rank, eps)
        self.q_b = nn.Linear(q_rank, heads * dim, bias=False)
        self.kv = nn.Linear(hidden, dim, bias=False)
        self.kv_norm = RMSNorm(dim, eps)
        self.sinks = nn.Parameter(torch.zeros(heads)) if config.latent.sinks else None
        self.out_a = nn.Linear(heads * config.value_dim, out_rank, bias=False)
        self.out_b = nn.Linear(out_rank, hidden, bias=False)
        self.add_feed_forward(config)

    def forward(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        rope: Rope,
        attention: Attention,
        keep: KeepRows | None = None,
    ) -> ResidualStream:
        """x and the delta yet to be added to it, both [T, H]; the same pair after the layer, of the rows kept."""
        x, normed = self.attn_norm(x, delta)
        delta = self.attend(normed, rope, attention, keep)
        return self.feed_forward(x if keep is None else keep(x), delta)

    def attend(self, x: torch.Tensor, rope: Rope, attention: Attention, keep: KeepRows | None = None) -> torch.Tensor:
        """x [T, H] normed; the residual's delta [T, H], of the rows kept."""
        narrow = self.q_norm(linear(x, self.q_a.weight))[1]
        query = linear(narrow, self.q_b.weight).view(-1, self.heads, self.head_dim)
        query = prepare_query(query, rope.positions, rope.table, eps=self.q_norm.eps)
        latent = linear(x, self.kv.weight)[:, None]
        norm = KvANormRope(weight=self.kv_norm.weight, eps=self.kv_norm.eps, positions=rope.positions, table=rope.table)
        sinks = None if self.sinks is None else self.sinks.float()
        value = latent[..., : self.value_dim]
        out = attention(AttentionInputs(self.layer, query, latent, value, kv_a_norm_rope=norm, sinks=sinks))
        if self.value_dim == self.head_dim:
            out = inverse_rotary(out, rope.positions, rope.table)
        out = out.flatten(1) if keep is None else keep(out.flatten(1))
        return linear(linear(out, self.out_a.weight), self.out_b.weight)
