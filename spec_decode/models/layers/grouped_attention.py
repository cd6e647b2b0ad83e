"""Attention with one key and one value per KV head, with optional head norms, output gates and partial rotation.

Legend: T tokens, H hidden size, h heads, D dims of a head, P rotated dims. Floats are in the weights' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from attn_backends.kernels.linear.fp8_weight import Weight
from attn_backends.kernels.linear.linear import linear
from attn_backends.kernels.rope import Rope
from builders import AttentionSpec
from spec_decode.model_api import Attention, AttentionInputs, KeepRows
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import ScopedWeights, frozen, held
from spec_decode.models.config import ModelConfig
from spec_decode.models.kernels.sigmoid_gate import sigmoid_gate
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.layers.rope import LLAMA_SCALINGS, RopeConfig, read_rope, read_rotated_dims


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedShape:
    """The shape of one attention layer.

    model        the sizes, as for any layer with grouped heads
    qk_norm      whether each query and key head is normed
    gated        whether the output is gated, with one gate for each query dim
    norm_offset  of the head norms: see RMSNorm.read
    qkv_bias     whether query, key and value have biases; None: if the checkpoint has one of them
    out_bias     whether the output projection has one
    """

    model: ModelConfig
    rope: RopeConfig
    qk_norm: bool
    gated: bool
    norm_offset: float
    qkv_bias: bool | None = None
    out_bias: bool = False

    def spec(self, page_size: int, dtype: torch.dtype) -> AttentionSpec:
        """Return the attention spec for a cache with this page size."""
        return self.model.attention_spec(page_size, dtype)

    @property
    def order(self) -> torch.Tensor:
        """int64 [D], the published dim at each place of a head here. Rotated pairs P / 2 apart move D / 2 apart, where
        kernels expect them. The same order of queries and keys leaves their products unchanged."""
        rotated = torch.arange(self.rope.dims).chunk(2)
        others = torch.arange(self.rope.dims, self.model.head_dim).chunk(2)
        halves = zip(rotated, others, strict=True) if len(others) == 2 else [(half,) for half in rotated]
        return torch.cat([part for half in halves for part in half])


def read_grouped_shape(
    config: ConfigReader, eps: float, *, qk_norm: bool, gated: bool, norm_offset: float, rotated: float
) -> GroupedShape:
    """Read the attention from config.json. rotated: the rotated fraction of a head, if the file does not say.

    Raises CheckpointError for an impossible attention.
    """
    hidden, heads = config.get("hidden_size", int), config.get("num_attention_heads", int)
    dim = config.get("head_dim", int, hidden // max(heads, 1))
    theta, scaling = read_rope(config, LLAMA_SCALINGS)
    try:
        model = ModelConfig(
            vocab_size=config.get("vocab_size", int),
            hidden_size=hidden,
            intermediate_size=1,
            num_layers=1,
            num_q_heads=heads,
            num_kv_heads=config.get("num_key_value_heads", int, heads),
            head_dim=dim,
            max_positions=config.get("max_position_embeddings", int),
            rope_theta=theta,
            norm_eps=eps,
        )
        model.attention_spec(1, torch.float32)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"invalid attention in {config.place}: {error}. Restore the file.") from error
    return GroupedShape(
        model=model,
        rope=RopeConfig(dims=read_rotated_dims(config, dim, rotated), theta=theta, scaling=scaling),
        qk_norm=qk_norm,
        gated=gated,
        norm_offset=norm_offset,
    )


class GroupedAttention(nn.Module):
    """The attention of one layer, loaded from tensors with Llama's and Qwen's names."""

    project_in: Weight
    out: Weight

    def __init__(self, shape: GroupedShape, weights: ScopedWeights) -> None:
        """Raises CheckpointError."""
        super().__init__()
        self.shape, hidden = shape, shape.model.hidden_size
        heads, dim = (
            (shape.model.num_q_heads * (1 + shape.gated), *[shape.model.num_kv_heads] * 2),
            shape.model.head_dim,
        )
        stored, rows = self._stored_rows().to(weights.device), [count * dim for count in heads]
        self.project_in = held(weights.product([f"{part}_proj.weight" for part in "qkv"], rows, hidden)[stored])
        self.bias = None
        found = any(weights.has(f"{part}_proj.bias") for part in "qkv")
        if found if shape.qkv_bias is None else shape.qkv_bias:
            self.bias = frozen(weights.stacked([f"{part}_proj.bias" for part in "qkv"], rows)[stored])
        self.q_norm = self._read_norm(weights, "q_norm.weight") if shape.qk_norm else None
        self.k_norm = self._read_norm(weights, "k_norm.weight") if shape.qk_norm else None
        num_heads = shape.model.num_q_heads
        self.out = weights.product(["o_proj.weight"], [hidden], num_heads * dim)
        self.out_bias = weights.parameter("o_proj.bias", hidden) if shape.out_bias else None
        self.sinks = weights.parameter("sinks", num_heads, dtype=torch.float32) if shape.model.sinks else None

    def _stored_rows(self) -> torch.Tensor:
        """int64: the row among the checkpoint's query, key and value of each row of project_in. A head's gate follows
        its query in the checkpoint, and all gates come last here."""
        model, parts = self.shape.model, 1 + self.shape.gated
        query, *gate = (
            torch.arange(model.num_q_heads * parts * model.head_dim).view(-1, parts, model.head_dim).unbind(1)
        )
        key, value = torch.arange(2 * model.num_kv_heads * model.head_dim).add(parts * query.numel()).chunk(2)
        return torch.cat(
            [self._ordered(query.flatten()), self._ordered(key), value, *[rows.flatten() for rows in gate]]
        )

    def _ordered(self, rows: torch.Tensor) -> torch.Tensor:
        """Reorder the dims of every head in rows [heads * D, ...]."""
        heads: torch.Tensor = rows.unflatten(0, (-1, self.shape.model.head_dim))
        return heads.index_select(1, self.shape.order.to(rows.device)).flatten(0, 1)

    def _read_norm(self, weights: ScopedWeights, name: str) -> RMSNorm:
        model = self.shape.model
        norm = RMSNorm.read(weights, name, model.head_dim, model.norm_eps, self.shape.norm_offset)
        norm.weight = frozen(self._ordered(norm.weight))
        return norm

    def forward(
        self, x: torch.Tensor, rope: Rope, layer: int, attention: Attention, keep: KeepRows | None = None
    ) -> torch.Tensor:
        """Return the residual's delta [T, H], for the kept rows. x: [T, H], normed."""
        model = self.shape.model
        heads = [model.num_q_heads, model.num_kv_heads, model.num_kv_heads, *[model.num_q_heads] * self.shape.gated]
        rows = linear(x, self.project_in, self.bias).unflatten(-1, (sum(heads), model.head_dim))
        query, key, value, *gate = rows.split(heads, 1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query)[1], self.k_norm(key)[1]
        attended = attention(AttentionInputs(layer, query, key, value, rope=rope, sinks=self.sinks)).flatten(1)
        attended = attended if keep is None else keep(attended)
        if gate:
            opened = gate[0].flatten(1)
            attended = sigmoid_gate(attended, opened if keep is None else keep(opened))
        return linear(attended, self.out, self.out_bias)
