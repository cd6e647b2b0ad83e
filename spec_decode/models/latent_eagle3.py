"""EAGLE-3 over latent attention, as published for DeepSeek's and Kimi's models: one layer with dense MLA.

Legend: T tokens, H hidden size.
"""

from __future__ import annotations

import torch

from spec_decode.model_api import DraftInputs, TargetModel
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import ScopedWeights, TensorStore
from spec_decode.models.config import MAX_LAYERS
from spec_decode.models.decoder_weights import read_parameters
from spec_decode.models.draft import check_aux_states
from spec_decode.models.draft_vocabulary import DraftVocabulary, read_vocabulary
from spec_decode.models.eagle3_parts import AuxStates, DraftHead, Eagle3Ends, first_prefix
from spec_decode.models.eagle3_parts import aux_hidden_state_layers as aux_hidden_state_layers
from spec_decode.models.kernels.embed_concat import embed_concat
from spec_decode.models.layers.feed_forward import Names, read_dense
from spec_decode.models.layers.mla_attention import MlaAttention, read_mla_shape
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.one_layer_draft import OneLayerDraft

ARCHITECTURES = ("Eagle3DeepseekV2ForCausalLM",)

_NAMES = Names(gate="gate_proj", up="up_proj", down="down_proj")


class LatentEagle3(Eagle3Ends, OneLayerDraft):
    """At position p, maps the token at p + 1 and the state at p to a state that predicts the token at p + 2."""

    def __init__(self, weights: ScopedWeights, vocabulary: DraftVocabulary, target: TargetModel) -> None:
        """Raises CheckpointError."""
        store, config = weights.store, weights.store.config
        layer = weights.under(first_prefix(store))
        norms = f"{layer.prefix}input_layernorm.weight", f"{layer.prefix}hidden_norm.weight"
        super().__init__(weights, target, embedding="embed_tokens.weight", norms=norms)
        hidden, eps = config.get("hidden_size", int), config.positive("rms_norm_eps")
        shape = read_mla_shape(config, hidden, eps)
        self.token_map, self.hidden_size, self.max_positions = vocabulary.token_map, hidden, target.max_positions
        with torch.device("meta"):
            aux = AuxStates(store, (self.target_states_size, target.hidden_size), hidden, eps)
            head = DraftHead(store, target, hidden, eps, vocabulary.scored)
        self.aux, self.head = read_parameters(aux, weights), read_parameters(head, weights)
        self._normed_residual = config.get("norm_before_residual", bool, False)
        self.attention = MlaAttention(shape, layer.under("self_attn."), self.max_positions, inputs=2 * hidden)
        self.mlp_norm = RMSNorm.read(layer, "post_attention_layernorm.weight", hidden, eps)
        self.mlp = read_dense(layer.under("mlp."), _NAMES, hidden, config.get("intermediate_size", int), None)

    def forward(self, inputs: DraftInputs) -> torch.Tensor:
        """Return states [T, H] that the head reads."""
        norms = [self.embedding_norm.weight, self.state_norm.weight]
        both = embed_concat(inputs.token_ids, self.embedding, inputs.hidden, norms, self.state_norm.eps)
        residual = both.chunk(2, -1)[1].contiguous() if self._normed_residual else inputs.hidden
        delta = self.attention(both, inputs.positions, self.layer, inputs.attention, inputs.keep)
        x, normed = self.mlp_norm(inputs.kept(residual), delta)
        return self.head.next_states(self.mlp(normed, x))


def serves(store: TensorStore) -> bool:
    """Whether config.json names the architecture, or the tensors have the names of EAGLE-3 and of MLA."""
    first = first_prefix(store)
    names = {f"{first}hidden_norm.weight", f"{first}self_attn.kv_a_proj_with_mqa.weight"}
    return any(name in ARCHITECTURES for name in store.architectures) or names <= store.names()


def load(store: TensorStore, target: TargetModel, *, dtype: torch.dtype, device: torch.device) -> LatentEagle3:
    """Load the draft, ready to run. Raises CheckpointError."""
    config = store.config
    config.require("hidden_act", "silu")
    config.require("attention_bias", False)
    if (count := config.get("num_hidden_layers", int, 1)) != 1:
        raise CheckpointError(
            f"num_hidden_layers in {config.place} must be 1 for EAGLE-3 over latent attention, got {count}. "
            "Use a draft with one layer."
        )
    vocab = config.get("vocab_size", int)
    read = config.get("target_hidden_size", int, config.get("hidden_size", int))
    layers = aux_hidden_state_layers(store, target.num_layers or MAX_LAYERS)
    check_aux_states(store, target, read, layers)
    vocabulary = read_vocabulary(store, target, vocab, device)
    weights = ScopedWeights(store, "", dtype, device)
    draft = LatentEagle3(weights, vocabulary, target)
    store.refuse_unused()
    return draft.eval()
