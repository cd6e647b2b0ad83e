"""EAGLE drafts (Li et al., 2024): the shipped pair's, and those in the layout that the authors publish."""

from __future__ import annotations

import torch

from spec_decode.model_api import TargetModel
from spec_decode.models.checkpoints.store import ScopedWeights, TensorStore
from spec_decode.models.config import ModelConfig
from spec_decode.models.decoder_config import read_decoder, states_draft_windows
from spec_decode.models.decoder_weights import read_parameters
from spec_decode.models.draft import check_target, decoder_fields, read_embedding
from spec_decode.models.draft_vocabulary import read_vocabulary
from spec_decode.models.layers.decoder_layer import (
    DecoderLayer,
    FirstLayer,
    LatentDecoderLayer,
    LayerOptions,
    later_layers,
)
from spec_decode.models.layers.fuse import Projection
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.layers.rope import RotaryEmbedding
from spec_decode.models.llama import LlamaTarget
from spec_decode.models.recurrent_draft import RecurrentDraft
from spec_decode.models.target_head import TargetHead


class EagleDraft(RecurrentDraft):
    """The shipped pair's: one layer, whose states are normed. Shares the target's embedding and output projection."""

    config: ModelConfig

    def __init__(self, config: ModelConfig, target: LlamaTarget) -> None:
        layer = DecoderLayer if config.latent is None else LatentDecoderLayer
        super().__init__(
            target,
            config,
            RotaryEmbedding(config),
            None,
            fuse=Projection(config.hidden_size),
            layers=[layer(config, 0)],
            norm=RMSNorm(config.hidden_size, config.norm_eps),
            head=TargetHead(target),
        )


def serves(store: TensorStore) -> bool:
    """Whether the checkpoint's tensors have EAGLE's names."""
    return "fc.weight" in store.names()


def load(store: TensorStore, target: TargetModel, *, dtype: torch.dtype, device: torch.device) -> RecurrentDraft:
    """Load the draft, ready to run: its first layer has no norm before its attention, and its states none. Raises
    CheckpointError."""
    config = read_decoder(decoder_fields(store), states_draft_windows, max_positions=target.max_positions)
    model, hidden = config.model, config.model.hidden_size
    check_target(store, target, hidden)
    vocabulary = read_vocabulary(store, target, model.vocab_size, device, has_head=False)
    weights = ScopedWeights(store, "", dtype, device)
    embed = read_embedding(weights, target, "embed_tokens.weight", vocabulary.embedded, hidden)
    with torch.device("meta"):
        first = FirstLayer(model, LayerOptions.found(store, "layers.0."), hidden)
        draft = RecurrentDraft(
            target,
            config,
            RotaryEmbedding(model, config.scaling),
            embed,
            fuse=Projection(hidden, bias=weights.has("fc.bias"), layer_norms=False),
            layers=[first, *later_layers(store, model)],
            norm=None,
            head=TargetHead(target),
        )
    draft.token_map = vocabulary.token_map
    draft = read_parameters(draft, weights, lambda name: name.replace("fuse.", "fc."))
    store.refuse_unused()
    return draft
