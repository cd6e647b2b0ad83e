"""Llama-style decoder layers, and one with attention over a latent per token.

Legend: T tokens, H hidden size, D head_dim, E value_dim. Floats are in the weights' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from attn_backends.kernels.head_rotary import inverse_rotary, prepare_query
from attn_backends.kernels.rope import Rope
from attn_backends.kernels.write_latent import KvANormRope
from spec_decode.model_api import Attention, AttentionInputs, KeepRows
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.config import ModelConfig
from spec_decode.models.layers.linear import (
    Linear,
    NormGateUp,
    NormGateUpGelu,
    NormLinear,
    ResidualLinear,
    ResidualStream,
)
from spec_decode.models.layers.rms_norm import RMSNorm


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOptions:
    """What layers differ in: biases of query, key and value and of the output, norms of queries and keys, norms of what
    attention and feed-forward read ("before") and of what they return ("after"), and the gate's activation."""

    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False
    """qk_norm is over all heads of a token together, not over each."""
    norms: Literal["before", "after", "both"] = "before"
    gelu: bool = False

    @classmethod
    def found(cls, store: TensorStore, prefix: str) -> LayerOptions:
        """Find the options of the layer with this prefix in a checkpoint."""
        names = store.names()
        return cls(
            qkv_bias=f"{prefix}self_attn.q_proj.bias" in names,
            out_bias=f"{prefix}self_attn.o_proj.bias" in names,
            qk_norm=f"{prefix}self_attn.q_norm.weight" in names,
        )


class ResidualLayer(nn.Module):
    """Attention and SwiGLU feed-forward, each with a pre-norm and a residual. Subclasses implement the attention."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset)

    def add_feed_forward(self, config: ModelConfig, *, gelu: bool = False) -> None:
        """Create the feed-forward. Separate, because its parameters come after the attention's."""
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.mlp_norm = RMSNorm(hidden, config.norm_eps, config.norm_offset)
        self.gate_up = (NormGateUpGelu if gelu else NormGateUp)(hidden, intermediate, intermediate)
        self.down = ResidualLinear(intermediate, hidden)

    def feed_forward(self, x: torch.Tensor, delta: torch.Tensor | None) -> ResidualStream:
        """Run the feed-forward on attention's x and delta [T, H]; returns the pair after the layer."""
        x, inner = self.gate_up(x, delta, self.mlp_norm)
        stream: ResidualStream = self.down(inner, x)
        return stream


class AttentionLayer(ResidualLayer):
    """Attention with one key and one value per KV head. Subclasses implement what surrounds it."""

    def __init__(
        self, config: ModelConfig, layer: int, options: LayerOptions | None = None, *, qkv_inputs: int | None = None
    ) -> None:
        """qkv_inputs: input dims of the query, key and value projection; None: those of the normed hidden states."""
        super().__init__(config, layer)
        options = options or LayerOptions()
        hidden, dim = config.hidden_size, config.head_dim
        self.heads, self.head_dim = (config.num_q_heads, config.num_kv_heads, config.num_kv_heads), dim
        rows, kind = [count * dim for count in self.heads], NormLinear if qkv_inputs is None else Linear
        self.qkv = kind(qkv_inputs or hidden, *rows, bias=options.qkv_bias)
        self.out = ResidualLinear(rows[0], hidden, bias=options.out_bias)
        sizes = rows[:2] if options.joint_qk_norm else [dim, dim]
        norms = [RMSNorm(size, config.norm_eps, config.norm_offset) if options.qk_norm else None for size in sizes]
        self.q_norm, self.k_norm = norms
        self.add_feed_forward(config, gelu=options.gelu)

    def attend(self, qkv: torch.Tensor, rope: Rope, attention: Attention) -> torch.Tensor:
        """Return the heads' outputs [T, heads * D] for qkv [T, (heads + 2 KV heads) * D]."""
        qkv = qkv.view(len(qkv), sum(self.heads), self.head_dim)
        query, key, value = qkv.split(self.heads, 1)
        if self.q_norm is not None and self.k_norm is not None:
            qkv = torch.cat([_normed(query, self.q_norm), _normed(key, self.k_norm), value], 1)
            query, key, value = qkv.split(self.heads, 1)
        return attention(AttentionInputs(self.layer, query, key, value, rope=rope)).flatten(1)


class DecoderLayer(AttentionLayer):
    """A Llama-style layer, with nothing but residuals around attention and feed-forward."""

    def forward(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        rope: Rope,
        attention: Attention,
        keep: KeepRows | None = None,
    ) -> ResidualStream:
        """Run the layer on x and the pending delta, both [T, H]; returns the same pair for the kept rows."""
        x, qkv = self.qkv(x, delta, self.attn_norm)
        return self.after_qkv(x, qkv, rope, attention, keep)

    def after_qkv(
        self, x: torch.Tensor, qkv: torch.Tensor, rope: Rope, attention: Attention, keep: KeepRows | None
    ) -> ResidualStream:
        """Run the layer after its first projection, on x [T, H] and qkv [T, (heads + 2 KV heads) * D]."""
        attended = self.attend(qkv, rope, attention)
        if keep is not None:
            x, attended = keep(x), keep(attended)
        return self.feed_forward(*self.out(attended, x))


class PostNormLayer(DecoderLayer):
    """A layer that norms what attention and feed-forward return, as OLMo-2's, or also what they read, as Gemma's."""

    def __init__(self, config: ModelConfig, layer: int, options: LayerOptions) -> None:
        super().__init__(config, layer, options)
        hidden, eps, offset = config.hidden_size, config.norm_eps, config.norm_offset
        self.attn_out_norm, self.mlp_out_norm = RMSNorm(hidden, eps, offset), RMSNorm(hidden, eps, offset)
        for name in ("attn_norm", "mlp_norm") if options.norms == "after" else ():
            self.register_module(name, None)

    def after_qkv(
        self, x: torch.Tensor, qkv: torch.Tensor, rope: Rope, attention: Attention, keep: KeepRows | None
    ) -> ResidualStream:
        """See DecoderLayer."""
        attended = self.attend(qkv, rope, attention)
        if keep is not None:
            x, attended = keep(x), keep(attended)
        delta = self.attn_out_norm(self.out.product(attended))[1]
        x, inner = self.gate_up(x, delta, self.mlp_norm)
        return x, self.mlp_out_norm(self.down.product(inner))[1]


def make_layer(config: ModelConfig, layer: int, options: LayerOptions) -> DecoderLayer:
    """Return the layer that norms what the options say."""
    return (DecoderLayer if options.norms == "before" else PostNormLayer)(config, layer, options)


def _normed(heads: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    """Return heads [T, h, D], normed one by one, or together by a norm of h D dims."""
    rows = heads.reshape(len(heads), -1, len(norm.weight))
    normed: torch.Tensor = norm(rows)[1]
    return normed.view(heads.shape)


class FirstLayer(DecoderLayer):
    """The first layer of a draft whose attention reads what the draft made of its inputs, without a norm in between."""

    def __init__(self, config: ModelConfig, options: LayerOptions, inputs: int) -> None:
        """inputs: dims of what the attention reads."""
        super().__init__(config, 0, options, qkv_inputs=inputs)
        del self.attn_norm

    def forward(
        self,
        x: torch.Tensor,
        read: torch.Tensor | None,
        rope: Rope,
        attention: Attention,
        keep: KeepRows | None = None,
    ) -> ResidualStream:
        """Run the layer on x [T, H] and on what its attention reads, [T, inputs]; returns x and the pending delta."""
        return self.after_qkv(x, self.qkv(read), rope, attention, keep)


def later_layers(store: TensorStore, config: ModelConfig) -> list[DecoderLayer]:
    """Return a draft's layers after the first, without parameters, with the options that the checkpoint has for
    each."""
    options = [LayerOptions.found(store, f"layers.{layer}.") for layer in range(1, config.num_layers)]
    return [DecoderLayer(config, layer, each) for layer, each in enumerate(options, 1)]


class LatentDecoderLayer(ResidualLayer):
    """Attention over one latent per token with low-rank queries and outputs, as in DeepSeek-V4's multi-token-prediction
    layer: sparse sliding-window MLA.

    A token's latent is the key of every head, and its first E dims are the value. Values that include rotated dims
    carry the rotation of their own position. Rotating the output back by the query's position leaves the difference of
    the two, so attention depends on relative positions only.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        assert config.latent is not None
        hidden, heads, dim, eps = config.hidden_size, config.num_q_heads, config.head_dim, config.norm_eps
        q_rank, out_rank = config.latent.q_rank, config.latent.out_rank
        self.heads, self.head_dim, self.value_dim = heads, dim, config.value_dim
        self.q_a = Linear(hidden, q_rank)
        self.q_norm = RMSNorm(q_rank, eps)
        self.q_b = Linear(q_rank, heads * dim)
        self.kv = Linear(hidden, dim)
        self.kv_norm = RMSNorm(dim, eps)
        self.sinks = nn.Parameter(torch.zeros(heads)) if config.latent.sinks else None
        self.out_a = Linear(heads * config.value_dim, out_rank)
        self.out_b = Linear(out_rank, hidden)
        self.add_feed_forward(config)

    def forward(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        rope: Rope,
        attention: Attention,
        keep: KeepRows | None = None,
    ) -> ResidualStream:
        """Run the layer on x and the pending delta, both [T, H]; returns the same pair for the kept rows."""
        x, normed = self.attn_norm(x, delta)
        delta = self.attend(normed, rope, attention, keep)
        return self.feed_forward(x if keep is None else keep(x), delta)

    def attend(self, x: torch.Tensor, rope: Rope, attention: Attention, keep: KeepRows | None = None) -> torch.Tensor:
        """Return the residual's delta [T, H] for normed x [T, H], for the kept rows."""
        narrow = self.q_norm(self.q_a.product(x))[1]
        query = self.q_b.product(narrow).view(-1, self.heads, self.head_dim)
        query = prepare_query(query, rope.positions, rope.table, eps=self.q_norm.eps)
        latent = self.kv.product(x)[:, None]
        norm = KvANormRope(weight=self.kv_norm.weight, eps=self.kv_norm.eps, positions=rope.positions, table=rope.table)
        sinks = None if self.sinks is None else self.sinks.float()
        value = latent[..., : self.value_dim]
        out = attention(AttentionInputs(self.layer, query, latent, value, kv_a_norm_rope=norm, sinks=sinks))
        if self.value_dim == self.head_dim:
            out = inverse_rotary(out, rope.positions, rope.table)
        out = out.flatten(1) if keep is None else keep(out.flatten(1))
        return self.out_b.product(self.out_a.product(out))
