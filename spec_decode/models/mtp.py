"""Multi-token prediction as published for DeepSeek-V3 and GLM-4.7-Flash (arXiv:2412.19437, section 2.2).

The draft's layers follow the target's last layer in the target's own checkpoint. Each is one decoder layer with dense
latent attention; the first reads the embedding of the token at p + 1 together with the target's state at p.
"""

from __future__ import annotations

from itertools import count

import torch

from spec_decode.model_api import DraftModel, TargetModel
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import ScopedWeights, TensorStore
from spec_decode.models.draft import check_shared, check_target
from spec_decode.models.layers.feed_forward import FeedForward, Names, read_dense
from spec_decode.models.layers.mla_attention import MlaAttention, read_mla_shape
from spec_decode.models.layers.moe import MixtureOfExperts, read_mixture, read_mixture_shape
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.mtp_draft import MtpModules, PredictionLayer, check_published_form

ARCHITECTURES = ("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")

_NAMES = Names(gate="gate_proj", up="up_proj", down="down_proj", router_bias="gate.e_score_correction_bias")


def serves(store: TensorStore) -> bool:
    """Whether config.json names one of the architectures."""
    return any(name in ARCHITECTURES for name in store.architectures)


def load(store: TensorStore, target: TargetModel, *, dtype: torch.dtype, device: torch.device) -> DraftModel:
    """Load the draft from a target's checkpoint, or from one that holds nothing else.

    A single such layer drafts at every step (MultiTokenPrediction); of several, each drafts one token (MtpModules). A
    layer without its own embedding or head shares the target's `embed.weight` and `logits`. Raises CheckpointError for
    any problem.
    """
    check_published_form(store.config)
    first, modules = store.config.get("num_hidden_layers", int), []
    for layer in range(first, first + count_modules(store, first)):
        weights = ScopedWeights(store, f"model.layers.{layer}.", dtype, device)
        modules.append(MultiTokenPrediction(weights, target, layer))
        weights.refuse_unused()
    return modules[0] if len(modules) == 1 else MtpModules(modules)


def count_modules(store: TensorStore, first: int) -> int:
    """Return the number of draft layers from `first` on. Raises CheckpointError if config.json says otherwise."""
    expected = store.config.get("num_nextn_predict_layers", int)
    layers = {name.split(".")[2] for name in store.names() if name.startswith("model.layers.")}
    present = next(index for index in count() if str(first + index) not in layers)
    if present != expected:
        raise CheckpointError(
            f"{store.folder} must hold num_nextn_predict_layers draft layers, {expected} from model.layers.{first} on, "
            f"got {present}. Complete the download, or correct config.json."
        )
    return expected


def read_feed_forward(
    config: ConfigReader, weights: ScopedWeights, layer: int, hidden: int
) -> FeedForward | MixtureOfExperts:
    """Read the feed-forward of this layer, by its index in the checkpoint: a mixture or dense. Raises
    CheckpointError."""
    routed = config.optional("n_routed_experts", int) is not None
    first, every = config.get("first_k_dense_replace", int, 0), config.get("moe_layer_freq", int, 1)
    if routed and layer >= first and layer % max(every, 1) == 0:
        return read_mixture(read_mixture_shape(config, hidden, scoring="sigmoid"), weights, _NAMES)
    return read_dense(weights, _NAMES, hidden, config.get("intermediate_size", int), None)


class MultiTokenPrediction(PredictionLayer):
    """The next step reads states after the head's norm, as in transformers and vLLM: the layer was trained on normed
    states."""

    def __init__(self, weights: ScopedWeights, target: TargetModel, layer: int) -> None:
        """layer: its index in the checkpoint, in which the draft's layers follow the target's."""
        config = weights.store.config
        hidden, eps = config.get("hidden_size", int), config.positive("rms_norm_eps")
        attention = read_mla_shape(config, hidden, eps)
        check_shared(weights.store.folder, "vocab_size", config.get("vocab_size", int), target.vocab_size)
        check_target(weights.store, target, hidden)
        super().__init__(weights, target, embedding="embed_tokens.weight", head="shared_head.head.weight")
        self.layer = layer - config.get("num_hidden_layers", int)
        self.fuse = weights.parameter("eh_proj.weight", hidden, 2 * hidden)
        self.attention_norm = RMSNorm.read(weights, "input_layernorm.weight", hidden, eps)
        self.attention = MlaAttention(attention, weights.under("self_attn."), self.max_positions)
        self.mlp_norm = RMSNorm.read(weights, "post_attention_layernorm.weight", hidden, eps)
        self.mlp = read_feed_forward(config, weights.under("mlp."), layer, hidden)
        self.final_norm = RMSNorm.read(weights, "shared_head.norm.weight", hidden, eps)
