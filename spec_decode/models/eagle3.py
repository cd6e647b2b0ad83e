"""EAGLE-3 (Li et al., 2025) and 3.1, in the authors' layout or that of `speculators`, and over latent attention as
published for DeepSeek's and Kimi's models.

The draft reads the states of several target layers, and can have its own vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from spec_decode.model_api import TargetModel
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.mask_token import require_mask_token
from spec_decode.models.checkpoints.store import ScopedWeights, TensorStore
from spec_decode.models.config import MAX_LAYERS
from spec_decode.models.decoder_config import read_decoder, states_draft_windows
from spec_decode.models.decoder_weights import read_parameters
from spec_decode.models.draft import (
    AttentionConfig,
    check_aux_states,
    check_shared,
    decoder_fields,
    is_by_speculators,
    read_embedding,
    read_layers,
)
from spec_decode.models.draft_vocabulary import HEAD, read_vocabulary
from spec_decode.models.layers.aux_states import AuxStates
from spec_decode.models.layers.decoder_layer import FirstLayer, LayerOptions, later_layers
from spec_decode.models.layers.feed_forward import Names, read_dense
from spec_decode.models.layers.fuse import NormedPair
from spec_decode.models.layers.linear import Linear, NormLinear
from spec_decode.models.layers.mla_attention import MlaAttention, read_mla_shape
from spec_decode.models.layers.pre_norm_layer import PreNormLayer
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.layers.rope import Rotary, RotaryEmbedding
from spec_decode.models.recurrent_draft import Head, NormedHead, OneLayer, ParallelDraft, RecurrentDraft
from spec_decode.models.target_head import TargetHead

LATENT_ARCHITECTURES = ("Eagle3DeepseekV2ForCausalLM",)
MASK_HIDDEN = "mask_hidden"
"""The tensor that P-EAGLE (Parallel EAGLE) adds: the input of a mask instead of the target's states."""

_NAMES = Names(gate="gate_proj", up="up_proj", down="down_proj")
_PUBLISHED = {
    "aux.": "",
    "fuse.embedding_norm.": "layers.0.input_layernorm.",
    "fuse.state_norm.": "layers.0.hidden_norm.",
    "head.norm.": "norm.",
    "head.linear.": "lm_head.",
    "head.": "lm_head.",
}
"""The beginnings of names in checkpoints, for parts with different names here."""


class _Stack(NamedTuple):
    """The layers, and what they need."""

    layers: Sequence[nn.Module]
    config: AttentionConfig
    rotary: Rotary
    eps: float


def serves(store: TensorStore) -> bool:
    """Whether the checkpoint's tensors have EAGLE-3's names, or config.json names the architecture over latents."""
    names = {"d2t", "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"}
    return not store.names().isdisjoint(names) or _is_latent(store)


def load(store: TensorStore, target: TargetModel, *, dtype: torch.dtype, device: torch.device) -> RecurrentDraft:
    """Load the draft, ready to run. Raises CheckpointError."""
    latent = _is_latent(store)
    fields = store.config if latent else decoder_fields(store)
    hidden = fields.get("hidden_size", int)
    layers = aux_hidden_state_layers(store, target.num_layers or MAX_LAYERS)
    check_aux_states(store, target, store.config.get("target_hidden_size", int, hidden), layers)
    vocabulary = read_vocabulary(store, target, fields.get("vocab_size", int), device)
    weights = ScopedWeights(store, "", dtype, device)
    mask = _read_mask(weights, vocabulary.known, target.target_states_size)
    stack = (_read_latent_layer if latent else _read_decoder_layers)(weights, fields, target)
    embed = read_embedding(weights, target, "embed_tokens.weight", vocabulary.embedded, hidden)
    sizes = target.target_states_size, target.hidden_size
    norm_all, norm_each = _flag(store, "norm_before_fc"), _flag(store, "fc_norm")
    with torch.device("meta"):
        aux = AuxStates(sizes, hidden, stack.eps, norm_all=norm_all, norm_each=norm_each)
        norm, head = _make_head(store, target, hidden, stack.eps, vocabulary.scored)
        norms = RMSNorm(hidden, stack.eps), RMSNorm(hidden, stack.eps)
        fuse = NormedPair(*norms, normed_residual=store.config.get("norm_before_residual", bool, False))
        draft = (RecurrentDraft if mask is None else ParallelDraft)(
            target, stack.config, stack.rotary, embed, fuse=fuse, layers=stack.layers, norm=norm, head=head
        )
    draft.aux, draft.hidden_size, draft.token_map = aux, hidden, vocabulary.token_map
    if isinstance(draft, ParallelDraft) and mask is not None:
        draft.mask_token_id, draft.mask_hidden = mask
    first = _first_prefix(store)
    draft = read_parameters(draft, weights, lambda name: published_name(name).replace("layers.0.", first))
    store.refuse_unused()
    return draft


def published_name(name: str) -> str:
    """Return the checkpoint's name of a parameter: checkpoints do not nest the parts."""
    for ours, theirs in _PUBLISHED.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def aux_hidden_state_layers(store: TensorStore, num_target_layers: int) -> tuple[int, ...]:
    """Return the target's states that the draft reads, as the layers they enter, 0 to n; n is the last layer's output.

    Checkpoints follow two conventions under one name, eagle_aux_hidden_state_layer_ids. SGLang and NVIDIA's trainer
    list layers whose *output* is read: their lists begin with 1, and the output of layer i enters layer i + 1. Others,
    including vLLM, list the layers that the states enter, and begin with 2; these and all other lists are used as they
    are. `speculators` always lists the layers that the states enter; speculators_model_type identifies its files.
    Without a list, the default is that of EAGLE-3's own training: 2, n // 2 and n - 3.

    Raises CheckpointError for states that the target does not have.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    section = _section(store, name)
    default = [2, num_target_layers // 2, num_target_layers - 3]
    by_output = section.get(name, list, default)[:1] == [1] and not is_by_speculators(store)
    return read_layers(section, name, num_target_layers, by_output=by_output, default=default)


def _is_latent(store: TensorStore) -> bool:
    """Whether config.json names the architecture, or the tensors have the names of EAGLE-3 and of MLA."""
    first = _first_prefix(store)
    names = {f"{first}hidden_norm.weight", f"{first}self_attn.kv_a_proj_with_mqa.weight"}
    return any(name in LATENT_ARCHITECTURES for name in store.architectures) or names <= store.names()


def _first_prefix(store: TensorStore) -> str:
    """Return the prefix of the first layer's tensors; the authors call the layer midlayer."""
    return "midlayer." if any(name.startswith("midlayer.") for name in store.names()) else "layers.0."


def _read_decoder_layers(weights: ScopedWeights, fields: ConfigReader, target: TargetModel) -> _Stack:
    """Return Llama-style layers, without parameters."""
    store = weights.store
    config = read_decoder(fields, states_draft_windows, max_positions=target.max_positions)
    model, options = config.model, LayerOptions.found(store, _first_prefix(store))
    with torch.device("meta"):
        layers = [FirstLayer(model, options, 2 * model.hidden_size), *later_layers(store, model)]
        return _Stack(layers, config, RotaryEmbedding(model, config.scaling), model.norm_eps)


def _read_latent_layer(weights: ScopedWeights, config: ConfigReader, target: TargetModel) -> _Stack:
    """Return one layer with dense MLA, with its parameters."""
    config.require("hidden_act", "silu")
    config.require("attention_bias", False)
    if (count := config.get("num_hidden_layers", int, 1)) != 1:
        raise CheckpointError(
            f"num_hidden_layers in {config.place} must be 1 for EAGLE-3 over latent attention, got {count}. "
            "Use a draft with one layer."
        )
    hidden, eps = config.get("hidden_size", int), config.positive("rms_norm_eps")
    shape, layer = read_mla_shape(config, hidden, eps), weights.under(_first_prefix(weights.store))
    attention = MlaAttention(shape, layer.under("self_attn."), inputs=2 * hidden)
    norm = RMSNorm.read(layer, "post_attention_layernorm.weight", hidden, eps)
    mlp = read_dense(layer.under("mlp."), _NAMES, hidden, config.get("intermediate_size", int), None)
    rotary = Rotary(shape.rope.table(target.max_positions))
    return _Stack([PreNormLayer(0, None, attention, norm, mlp)], OneLayer("layers", shape), rotary, eps)


def _make_head(
    store: TensorStore, target: TargetModel, hidden: int, eps: float, scored: int
) -> tuple[RMSNorm | None, Head]:
    """Return the norm of states that the next step reads (EAGLE-3.1), None for states before the norm, and the
    projection to `scored` tokens: the target's, if the checkpoint has none. Raises CheckpointError if the draft would
    use the head of a target of another width."""
    owns, norm = HEAD in store.names(), RMSNorm(hidden, eps)
    if not owns:
        check_shared(f"{store.folder}, without a head,", "hidden_size", hidden, target.hidden_size)
    if _flag(store, "norm_output"):
        return norm, Linear(hidden, scored) if owns else TargetHead(target)
    return None, NormedHead(norm, NormLinear(hidden, scored) if owns else TargetHead(target))


def _read_mask(weights: ScopedWeights, vocab_size: int, states_size: int) -> tuple[int, torch.Tensor] | None:
    """Return the token and the states of a mask, or None if the checkpoint has none."""
    if not weights.has(MASK_HIDDEN):
        return None
    token = require_mask_token(weights.store, vocab_size, f"the checkpoint has {MASK_HIDDEN}")
    return token, weights.store.take_flat(MASK_HIDDEN, states_size, weights.dtype).to(weights.device)


def _flag(store: TensorStore, name: str) -> bool:
    return _section(store, name).get(name, bool, False)


def _section(store: TensorStore, name: str) -> ConfigReader:
    """Return the section of config.json that has a field: the top level, or NVIDIA's eagle_config."""
    return store.config if store.config.values.get(name) else store.config.section("eagle_config")
