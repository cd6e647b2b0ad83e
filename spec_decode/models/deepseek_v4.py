"""DeepSeek-V4's multi-token-prediction layer, loaded from tensors with DeepSeek's published names (`mtp.0.*`).

Legend: T tokens, H hidden size, S streams of the residual.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from spec_decode.model_api import DraftInputs, TargetModel
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import ScopedWeights, TensorStore
from spec_decode.models.draft import check_shared, check_target
from spec_decode.models.kernels.fp8_weight import Weight
from spec_decode.models.kernels.hyper_connections import write_streams
from spec_decode.models.kernels.linear import linear
from spec_decode.models.layers.feed_forward import Names
from spec_decode.models.layers.hyper_connections import HyperConnection, HyperHead, HyperShape
from spec_decode.models.layers.moe import read_mixture, read_mixture_shape
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.layers.window_attention import WindowAttention, read_window_shape
from spec_decode.models.mtp_draft import MtpDraft, check_published_form

ARCHITECTURES = ("DeepseekV4ForCausalLM",)

_NAMES = Names(gate="w1", up="w3", down="w2", router_bias="gate.bias")


def serves(store: TensorStore) -> bool:
    """Whether config.json names one of the architectures."""
    return any(name in ARCHITECTURES for name in store.architectures)


def load(store: TensorStore, target: TargetModel, *, dtype: torch.dtype, device: torch.device) -> DeepseekV4Prediction:
    """Load the draft from a target's checkpoint, or from one that holds nothing else.

    Only the first of several such layers is used, at every step. A layer without its own embedding or head shares the
    target's `embed.weight` and `logits`. Raises CheckpointError for any problem.
    """
    weights = ScopedWeights(store, "mtp.0.", dtype, device)
    draft = DeepseekV4Prediction(weights, target)
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


class DeepseekV4Prediction(MtpDraft):
    """At position p, maps the token at p + 1 and the residual at p to a residual that predicts the token at p + 2.

    A state holds all streams of a token, [S H]. target_hidden_states are the streams after the target's last layer,
    before the target's head collapses them.
    """

    from_embedding: Weight
    from_state: Weight

    def __init__(self, weights: ScopedWeights, target: TargetModel) -> None:
        config = weights.store.config
        check_published_form(config)
        _check_uncompressed(config)
        hidden, eps = config.get("hidden_size", int), config.positive("rms_norm_eps")
        attention, hyper = read_window_shape(config, hidden, eps), _read_hyper_shape(config, hidden, eps)
        mixture = read_mixture_shape(config, hidden, scoring="sqrtsoftplus")
        remedy = "Create the target with the residual streams after its last layer as target_hidden_states."
        states_size = hyper.streams * hidden
        check_shared(weights.store.folder, "vocab_size", config.get("vocab_size", int), target.vocab_size)
        check_target(weights.store, target, hidden, states_size=states_size, remedy=remedy)
        super().__init__(weights, target, embedding="embed.weight", head="head.weight")
        self.streams = hyper.streams
        self.from_embedding = weights.parameter("e_proj.weight", hidden, hidden)
        self.from_state = weights.parameter("h_proj.weight", hidden, hidden)
        self.attention_connection = HyperConnection.from_weights(weights, "hc_attn", hyper, hyper.mixes, 3)
        self.attention_norm = RMSNorm.read(weights, "attn_norm.weight", hidden, eps)
        self.attention = WindowAttention(attention, weights.under("attn."), self.max_positions)
        self.mlp_connection = HyperConnection.from_weights(weights, "hc_ffn", hyper, hyper.mixes, 3)
        self.mlp_norm = RMSNorm.read(weights, "ffn_norm.weight", hidden, eps)
        self.mlp = read_mixture(mixture, weights.under("ffn."), _NAMES)
        self.collapse = HyperHead.from_weights(weights, "hc_head", hyper, hyper.streams, 1)
        self.head_norm = RMSNorm.read(weights, "norm.weight", hidden, eps)

    def forward(self, inputs: DraftInputs) -> torch.Tensor:
        """Return states [T, S H], for hidden [T, S H]."""
        embedded = self.embedding_norm(F.embedding(inputs.token_ids, self.embedding))[1]
        streams = inputs.hidden.unflatten(-1, (self.streams, -1))
        streams = linear(self.state_norm(streams)[1].flatten(0, 1), self.from_state).view_as(streams)
        streams = streams + linear(embedded, self.from_embedding)[:, None]

        x, *into = self.attention_connection.read(streams)
        x = self.attention(self.attention_norm(x)[1], inputs.positions, 0, inputs.attention, inputs.keep)
        streams = write_streams(inputs.kept(streams), x, *map(inputs.kept, into))

        x, *into = self.mlp_connection.read(streams)
        return write_streams(streams, self.mlp(self.mlp_norm(x)[1]), *into).flatten(1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, vocab_size] for hidden [T, S H]."""
        streams = hidden.unflatten(-1, (self.streams, -1))
        return self.projected(self.head_norm(self.collapse(streams))[1])
