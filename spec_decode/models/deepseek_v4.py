"""DeepSeek-V4's multi-token-prediction layer, from tensors named as DeepSeek publishes them (`mtp.0.*`).

Legend: T tokens, H hidden size, S streams of the residual, h heads, D head dim, G groups of heads. Attention is over
one latent per token, in a sliding window: key and value of every head in all of its dims, with a sink logit per head
(as in latent_attention). Its output, turned back by the query's rotation, goes through a low rank per group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from attn_backends.kernels.latent_rotary import inverse_rotary, prepare_query
from attn_backends.kernels.write_latent import KvANormRope
from builders import AttentionKind, AttentionSpec
from spec_decode.models.attention import Attention, AttentionInputs
from spec_decode.models.base import LayerGroup, TargetModel
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.errors import CheckpointError
from spec_decode.models.checkpoints.scoped_weights import ScopedWeights, frozen
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.draft import check_shared, check_target_hidden_states
from spec_decode.models.kernels.skinny_linear import linear
from spec_decode.models.layers.feed_forward import MixtureShape, Names, read_mixture, read_mixture_shape
from spec_decode.models.layers.hyper_connections import HyperConnection, HyperHead, HyperShape
from spec_decode.models.layers.yarn import Rope
from spec_decode.models.mtp_draft import PredictionDraft, check_published_form

ARCHITECTURES = ("DeepseekV4ForCausalLM",)

_NAMES = Names(gate="w1", up="w3", down="w2", router_bias="gate.bias")


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowShape:
    """Sizes of the layer's attention."""

    hidden: int
    heads: int
    head_dim: int
    q_rank: int
    out_rank: int
    groups: int
    window: int
    rope: Rope
    eps: float

    def spec(self, page_size: int, dtype: torch.dtype) -> AttentionSpec:
        return AttentionSpec(
            num_q_heads=self.heads,
            num_kv_heads=1,
            head_dim=self.head_dim,
            page_size=page_size,
            dtype=dtype,
            sliding_window=self.window,
            sinks=True,
            kind=AttentionKind.MLA,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class V4Shape:
    """What config.json says of the draft's layer."""

    vocab_size: int
    hidden: int
    max_positions: int
    eps: float
    attention: WindowShape
    mixture: MixtureShape
    hyper: HyperShape


def serves(config: dict[str, Any]) -> bool:
    """Whether `load` reads checkpoints with this config.json."""
    return any(name in ARCHITECTURES for name in config.get("architectures") or ())


def load(store: TensorStore, target: TargetModel, *, dtype: torch.dtype, device: torch.device) -> DeepseekV4Prediction:
    """The draft in a target's checkpoint, or in one that holds nothing else.

    Of several such layers the first is taken, and used at every step. Embedding and head are the target's
    `embed.weight` and `logits`. Raises CheckpointError for anything amiss.
    """
    config = ConfigReader(store.config, str(store.folder / "config.json"))
    shape = read_shape(config)
    check_shared(store, "vocab_size", shape.vocab_size, target.vocab_size)
    check_shared(store, "hidden_size", shape.hidden, target.hidden_size)
    remedy = "Make the target with the residual streams behind its last layer as target_hidden_states."
    check_target_hidden_states(store, shape.hyper.streams * shape.hidden, target, remedy)
    weights = ScopedWeights(store, "mtp.0.", dtype, device)
    draft = DeepseekV4Prediction(shape, weights, target)
    weights.refuse_unused()
    return draft


def read_shape(config: ConfigReader) -> V4Shape:
    """Raises CheckpointError for a config that no such layer could have, or that is stored otherwise."""
    check_published_form(config)
    _check_uncompressed(config)
    hidden, eps = config.get("hidden_size", int), config.get("rms_norm_eps", float)
    return V4Shape(
        vocab_size=config.get("vocab_size", int),
        hidden=hidden,
        max_positions=config.get("max_position_embeddings", int),
        eps=eps,
        attention=_read_window_shape(config, hidden, eps),
        mixture=read_mixture_shape(config, hidden, scoring="sqrtsoftplus"),
        hyper=_read_hyper_shape(config, hidden, eps),
    )


def _read_hyper_shape(config: ConfigReader, hidden: int, eps: float) -> HyperShape:
    counts = {name: config.get(name, int) for name in ("hc_mult", "hc_sinkhorn_iters")}
    for name, count in counts.items():
        if count < 1:
            raise CheckpointError(
                f"{name} in {config.place} must be at least 1, got {count}; there would be no residual, so nothing was "
                "loaded. Restore the file."
            )
    return HyperShape(
        streams=counts["hc_mult"],
        hidden=hidden,
        iterations=counts["hc_sinkhorn_iters"],
        eps=config.get("hc_eps", float),
        norm_eps=eps,
    )


def _check_uncompressed(config: ConfigReader) -> None:
    """The draft's layer comes behind the target's in the list of ratios; 0 and 1 are both a window and no more."""
    ratios, layer = config.get("compress_ratios", list, []), config.get("num_hidden_layers", int)
    if layer < len(ratios) and ratios[layer] not in (0, 1):
        raise CheckpointError(
            f"compress_ratios in {config.place} must be 0 or 1 at the draft's layer {layer}, got {ratios[layer]}; a "
            "draft with a compressed cache is not known, so nothing was loaded. Use another checkpoint."
        )


def _read_window_shape(config: ConfigReader, hidden: int, eps: float) -> WindowShape:
    heads, groups = config.get("num_attention_heads", int), config.get("o_groups", int)
    dim, rotated = config.get("head_dim", int), config.get("qk_rope_head_dim", int)
    if groups < 1 or heads % groups or not 2 <= rotated <= dim or rotated % 2:
        raise CheckpointError(
            f"{config.place} must divide its heads into o_groups and turn an even number of dims of a head, got "
            f"{heads} heads in {groups} groups and {rotated} dims of {dim}; nothing was loaded. Restore the file."
        )
    return WindowShape(
        hidden=hidden,
        heads=heads,
        head_dim=dim,
        q_rank=config.get("q_lora_rank", int),
        out_rank=config.get("o_lora_rank", int),
        groups=groups,
        window=config.get("sliding_window", int),
        # rope_scaling and compress_rope_theta are those of the target's compressed layers.
        rope=Rope(dims=rotated, theta=config.get("rope_theta", float)),
        eps=eps,
    )


class WindowAttention(nn.Module):
    """The layer's attention."""

    table: torch.Tensor

    def __init__(self, shape: WindowShape, weights: ScopedWeights, max_positions: int) -> None:
        super().__init__()
        self.shape = shape
        names = ["wq_a.weight", "wkv.weight"]
        self.project_in = weights.stacked(names, [shape.q_rank, shape.head_dim], shape.hidden)
        self.q_norm = weights.norm("q_norm.weight", shape.q_rank, shape.eps)
        self.q_up = weights.parameter("wq_b.weight", shape.heads * shape.head_dim, shape.q_rank)
        self.kv_norm = weights.norm("kv_norm.weight", shape.head_dim, shape.eps)
        self.sinks = weights.parameter("attn_sink", shape.heads, dtype=torch.float32)
        of_group = shape.heads * shape.head_dim // shape.groups
        out_down = weights.take("wo_a.weight", shape.groups * shape.out_rank, of_group)
        self.out_down = frozen(out_down.unflatten(0, (shape.groups, -1)))
        self.out_up = weights.parameter("wo_b.weight", shape.hidden, shape.groups * shape.out_rank)
        self.register_buffer("table", shape.rope.table(max_positions).to(weights.device), persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, layer: int, attention: Attention) -> torch.Tensor:
        """x [T, H] normed, positions int64 [T]; [T, H]."""
        shape = self.shape
        query, latent = linear(x, self.project_in).split([shape.q_rank, shape.head_dim], -1)
        query = linear(self.q_norm(query)[1], self.q_up).unflatten(-1, (shape.heads, -1))
        query = prepare_query(query, positions, self.table, eps=shape.eps)
        norm = KvANormRope(weight=self.kv_norm.weight, eps=shape.eps, positions=positions, table=self.table)
        latent = latent[:, None]
        out = attention(AttentionInputs(layer, query, latent, latent, kv_a_norm_rope=norm, sinks=self.sinks))
        groups = inverse_rotary(out, positions, self.table).view(x.shape[0], shape.groups, -1)
        narrow = torch.bmm(groups.transpose(0, 1), self.out_down.mT).transpose(0, 1)
        return linear(narrow.flatten(1), self.out_up)


class DeepseekV4Prediction(PredictionDraft):
    """At position p: the token at p + 1 and the residual at p give a residual that predicts the token at p + 2.

    A state is all streams of a token, [S H]: as target_hidden_states, those after the target's last layer, before its
    own head collapses them.
    """

    def __init__(self, shape: V4Shape, weights: ScopedWeights, target: TargetModel) -> None:
        hidden, eps = shape.hidden, shape.eps
        super().__init__(
            weights, target, vocab=shape.vocab_size, hidden=hidden, embedding="embed.weight", head="head.weight"
        )
        self.shape, self.max_positions = shape, shape.max_positions
        self.hidden_size = self.target_states_size = shape.hyper.streams * hidden
        self.embedding_norm = weights.norm("enorm.weight", hidden, eps)
        self.state_norm = weights.norm("hnorm.weight", hidden, eps)
        self.from_embedding = weights.parameter("e_proj.weight", hidden, hidden)
        self.from_state = weights.parameter("h_proj.weight", hidden, hidden)
        self.attention_connection = HyperConnection(shape.hyper, *_connection(shape.hyper, weights, "hc_attn"))
        self.attention_norm = weights.norm("attn_norm.weight", hidden, eps)
        self.attention = WindowAttention(shape.attention, weights.under("attn."), shape.max_positions)
        self.mlp_connection = HyperConnection(shape.hyper, *_connection(shape.hyper, weights, "hc_ffn"))
        self.mlp_norm = weights.norm("ffn_norm.weight", hidden, eps)
        self.mlp = read_mixture(shape.mixture, weights.under("ffn."), _NAMES)
        self.collapse = HyperHead(shape.hyper, *_collapse(shape.hyper, weights))
        self.head_norm = weights.norm("norm.weight", hidden, eps)

    def layer_groups(self, page_size: int) -> list[LayerGroup]:
        """The one layer."""
        spec = self.shape.attention.spec(page_size, self.from_state.dtype)
        return [LayerGroup(name="mtp", spec=spec, layers=(0,))]

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """token_ids, positions int64 [T], hidden [T, S H]; states [T, S H]."""
        embedded = self.embedding_norm(self.embedded(token_ids))[1]
        streams = hidden.unflatten(-1, (self.shape.hyper.streams, -1))
        streams = F.linear(self.state_norm(streams)[1], self.from_state)
        streams = streams + linear(embedded, self.from_embedding)[:, None]

        x, *into = self.attention_connection.read(streams)
        x = self.attention(self.attention_norm(x)[1], positions, 0, attention)
        streams = self.attention_connection.write(streams, x, *into)

        x, *into = self.mlp_connection.read(streams)
        return self.mlp_connection.write(streams, self.mlp(self.mlp_norm(x)[1]), *into).flatten(1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, S H]; logits [T, vocab_size]."""
        streams = hidden.unflatten(-1, (self.shape.hyper.streams, -1))
        return self.projected(self.head_norm(self.collapse(streams))[1])


def _connection(
    shape: HyperShape, weights: ScopedWeights, name: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _hyper_weights(weights, name, shape.mixes, shape.streams * shape.hidden, 3)


def _collapse(shape: HyperShape, weights: ScopedWeights) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _hyper_weights(weights, "hc_head", shape.streams, shape.streams * shape.hidden, 1)


def _hyper_weights(
    weights: ScopedWeights, name: str, mixes: int, width: int, scales: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In fp32, whatever the model's dtype: the streams' shares are computed in it."""
    return (
        weights.take(f"{name}_fn", mixes, width, dtype=torch.float32),
        weights.take(f"{name}_scale", scales, dtype=torch.float32),
        weights.take(f"{name}_base", mixes, dtype=torch.float32),
    )
