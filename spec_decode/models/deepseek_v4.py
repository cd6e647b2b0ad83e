"""DeepSeek-V4's multi-token-prediction layer, loaded from tensors with DeepSeek's published names (`mtp.0.*`).

Legend: T tokens, H hidden size, S streams of the residual.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from attn_backends.kernels.rope import Rope
from spec_decode.model_api import Attention, KeepRows, TargetModel
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import ScopedWeights, TensorStore
from spec_decode.models.draft import check_shared, check_target, read_embedding
from spec_decode.models.kernels.hyper_connections import write_streams
from spec_decode.models.layers.feed_forward import Names
from spec_decode.models.layers.hyper_connections import HyperConnection, HyperHead, HyperShape
from spec_decode.models.layers.linear import Linear, ResidualStream
from spec_decode.models.layers.moe import read_mixture, read_mixture_shape
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.layers.rope import Rotary
from spec_decode.models.layers.window_attention import WindowAttention, WindowShape, read_window_shape
from spec_decode.models.mtp import read_head, require_draft_layers
from spec_decode.models.recurrent_draft import OneLayer, RecurrentDraft
from spec_decode.models.target_head import TargetHead

ARCHITECTURES = ("DeepseekV4ForCausalLM",)

_NAMES = Names(gate="w1", up="w3", down="w2", router_bias="gate.bias")


def serves(store: TensorStore) -> bool:
    """Whether config.json names one of the architectures."""
    return any(name in ARCHITECTURES for name in store.architectures)


def load(store: TensorStore, target: TargetModel, *, dtype: torch.dtype, device: torch.device) -> RecurrentDraft:
    """Load the draft from a target's checkpoint, or from one that holds nothing else.

    Only the first of several such layers is used, at every step. A layer without its own embedding or head shares the
    target's `embed.weight` and `logits`. A state holds all streams of a token, [S H]; target_hidden_states are the
    streams after the target's last layer, before the target's head collapses them. Raises CheckpointError for any
    problem.
    """
    weights, config = ScopedWeights(store, "mtp.0.", dtype, device), store.config
    require_draft_layers(config)
    config.require("hidden_act", "silu")
    config.require("attention_bias", False)
    _check_uncompressed(config)
    hidden, eps = config.get("hidden_size", int), config.positive("rms_norm_eps")
    shape, hyper = read_window_shape(config, hidden, eps), _read_hyper_shape(config, hidden, eps)
    remedy = "Create the target with the residual streams after its last layer as target_hidden_states."
    check_shared(store.folder, "vocab_size", config.get("vocab_size", int), target.vocab_size)
    check_target(store, target, hidden, states_size=hyper.streams * hidden, remedy=remedy)
    draft = RecurrentDraft(
        target,
        OneLayer("mtp", shape),
        Rotary(shape.rope.table(config.get("max_position_embeddings", int)).to(device)),
        read_embedding(weights, target, "embed.weight", target.vocab_size, hidden),
        fuse=StreamsFuse(weights, hidden, eps),
        layers=[StreamsLayer(weights, shape, hyper)],
        norm=None,
        head=StreamsHead(weights, hyper, read_head(weights, target, "head.weight", hidden)),
    )
    weights.refuse_unused()
    return draft


def _read_hyper_shape(config: ConfigReader, hidden: int, eps: float) -> HyperShape:
    counts = {name: config.get(name, int) for name in ("hc_mult", "hc_sinkhorn_iters")}
    for name, count in counts.items():
        if count < 1:
            raise CheckpointError(f"{name} in {config.place} must be at least 1, got {count}. Restore the file.")
    streams, iterations = counts.values()
    return HyperShape(
        streams=streams, hidden=hidden, iterations=iterations, eps=config.positive("hc_eps"), norm_eps=eps
    )


def _check_uncompressed(config: ConfigReader) -> None:
    """The draft's layer follows the target's in the list of ratios; both 0 and 1 mean a window without compression."""
    ratios, layer = config.get("compress_ratios", list, []), config.get("num_hidden_layers", int)
    if layer < len(ratios) and ratios[layer] not in (0, 1):
        raise CheckpointError(
            f"compress_ratios in {config.place} must be 0 or 1 at the draft's layer {layer}, got {ratios[layer]}; "
            "compressed caches are not supported. Use another checkpoint."
        )


class StreamsFuse(nn.Module):
    """Adds the projected embedding of a token to each projected stream of the state before it."""

    def __init__(self, weights: ScopedWeights, hidden: int, eps: float) -> None:
        super().__init__()
        self.embedding_norm, self.state_norm = (
            RMSNorm.read(weights, f"{name}.weight", hidden, eps) for name in ("enorm", "hnorm")
        )
        self.from_embedding, self.from_state = (
            Linear.of(weights.parameter(f"{name}.weight", hidden, hidden)) for name in ("e_proj", "h_proj")
        )

    def stream(self, token_ids: torch.Tensor, embedding: torch.Tensor, hidden: torch.Tensor) -> ResidualStream:
        """Return streams [T, S H] and None, for token_ids int64 [T], embedding [V, H] and hidden [T, S H]."""
        embedded = self.embedding_norm(F.embedding(token_ids, embedding))[1]
        streams = hidden.unflatten(-1, (-1, embedding.shape[1]))
        streams = self.from_state.product(self.state_norm(streams)[1].flatten(0, 1)).view_as(streams)
        return (streams + self.from_embedding.product(embedded)[:, None]).flatten(1), None


class StreamsLayer(nn.Module):
    """Attention and a mixture of experts, each with a pre-norm, between hyper-connections to the streams."""

    def __init__(self, weights: ScopedWeights, attention: WindowShape, hyper: HyperShape) -> None:
        super().__init__()
        config, hidden, eps = weights.store.config, hyper.hidden, hyper.norm_eps
        mixture = read_mixture_shape(config, hidden, scoring="sqrtsoftplus")
        self.streams = hyper.streams
        self.attention_connection = HyperConnection.from_weights(weights, "hc_attn", hyper, hyper.mixes, 3)
        self.attention_norm = RMSNorm.read(weights, "attn_norm.weight", hidden, eps)
        self.attention = WindowAttention(attention, weights.under("attn."))
        self.mlp_connection = HyperConnection.from_weights(weights, "hc_ffn", hyper, hyper.mixes, 3)
        self.mlp_norm = RMSNorm.read(weights, "ffn_norm.weight", hidden, eps)
        self.mlp = read_mixture(mixture, weights.under("ffn."), _NAMES)

    def forward(
        self, x: torch.Tensor, delta: None, rope: Rope, attention: Attention, keep: KeepRows | None = None
    ) -> ResidualStream:
        """Return streams [T, S H] and None for the streams x [T, S H]."""
        streams = x.unflatten(-1, (self.streams, -1))
        x, *into = self.attention_connection.read(streams)
        x = self.attention(self.attention_norm(x)[1], rope, 0, attention, keep)
        if keep is not None:
            streams, *into = map(keep, (streams, *into))
        streams = write_streams(streams, x, *into)

        x, *into = self.mlp_connection.read(streams)
        return write_streams(streams, self.mlp(self.mlp_norm(x)[1]), *into).flatten(1), None


class StreamsHead(nn.Module):
    """Collapses the streams of a state before the norm and the projection to the vocabulary."""

    def __init__(self, weights: ScopedWeights, hyper: HyperShape, linear: Linear | TargetHead) -> None:
        super().__init__()
        self.streams, self.linear = hyper.streams, linear
        self.collapse = HyperHead.from_weights(weights, "hc_head", hyper, hyper.streams, 1)
        self.norm = RMSNorm.read(weights, "norm.weight", hyper.hidden, hyper.norm_eps)

    def product(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, vocab_size] for hidden [T, S H]."""
        collapsed = self.collapse(hidden.unflatten(-1, (self.streams, -1)))
        return self.linear.product(self.norm(collapsed)[1])
