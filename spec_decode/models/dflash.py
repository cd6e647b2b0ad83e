"""DFlash as published: a block of masks with bidirectional attention over context made from the target's states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from spec_decode.model_api import ContextAttention, ContextBlockDraft, DraftInputs, TargetModel
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.mask_token import require_mask_token
from spec_decode.models.checkpoints.store import ScopedWeights, TensorStore
from spec_decode.models.config import MAX_LAYERS
from spec_decode.models.decoder_config import DecoderConfig, read_decoder
from spec_decode.models.decoder_weights import read_parameters
from spec_decode.models.draft import (
    HiddenStatesDraft,
    check_aux_states,
    check_shared,
    decoder_fields,
    read_layers,
)
from spec_decode.models.draft_vocabulary import DraftVocabulary, read_vocabulary
from spec_decode.models.kernels.linear import linear
from spec_decode.models.layer_windows import SLIDING, default_kinds, no_windows, read_layer_kinds
from spec_decode.models.layers.decoder_layer import AttentionLayer, DecoderLayer, LayerOptions
from spec_decode.models.layers.linear import Linear
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.target_head import TargetHead

D = TypeVar("D", bound="DFlash")

_OUTPUT_FIELDS, _INPUT_FIELD = ("target_layer_ids", "dspark_target_layer_ids"), "aux_hidden_state_layer_ids"
"""Fields with the list of target layers whose outputs are read, and speculators' field with those whose inputs are."""
_FACTORS = {
    "attention_value_scale": 1.0,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
}
"""Scales and caps that no tensor reveals, each with the value that has no effect."""


class DFlash(HiddenStatesDraft, ContextBlockDraft):
    """Runs the next token and K masks through all layers at once; a mask predicts the token at its own position.

    The context of a layer is keys and values that it projects from the target's states, after `fc` and `hidden_norm`,
    which all layers share.
    """

    windows_are_causal: ClassVar[bool] = True
    """Whether layers with a sliding window are causal if config.json does not say; other layers never are."""

    config_json: Mapping[str, Any]
    """The content of config.json as read; a draft that is trained further is saved with it."""

    def __init__(
        self, weights: ScopedWeights, config: DecoderConfig, vocabulary: DraftVocabulary, target: TargetModel
    ) -> None:
        super().__init__(weights, config, vocabulary, target)
        store, model = weights.store, config.model
        self.config_json = store.config.values
        self.target_states_size = target.target_states_size
        self.first_place = 0 if _samples_from_anchor(store) else 1
        self.fc = Linear(self.target_states_size, model.hidden_size)
        self.hidden_norm = RMSNorm(model.hidden_size, model.norm_eps)
        options = LayerOptions.found(store, "layers.0.")
        self.layers = nn.ModuleList(self.make_layer(store, layer, options) for layer in range(model.num_layers))
        self.norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.lm_head: Linear | TargetHead = TargetHead(target)
        if weights.has("lm_head.weight"):
            self.lm_head = Linear(model.hidden_size, vocabulary.scored)

    def make_layer(self, store: TensorStore, layer: int, options: LayerOptions) -> AttentionLayer:
        """Create a layer without parameters."""
        return DecoderLayer(self.config.model, layer, options)

    def combine(self, target_hidden_states: torch.Tensor) -> torch.Tensor:
        """Map target_hidden_states [T, F] to normed states [T, H], from which every layer's context is made."""
        normed: torch.Tensor = self.hidden_norm(self.fc.product(target_hidden_states))[1]
        return normed

    def write_context(self, states: torch.Tensor, positions: torch.Tensor, attention: ContextAttention) -> None:
        """Store each layer's keys and values of states [T, H], the output of `combine`, at positions int64 [T]."""
        rope = self.rotary(positions)
        for layer in self.layers:
            assert isinstance(layer, AttentionLayer)
            heads, kv_heads, _ = layer.heads
            rows = slice(heads * layer.head_dim, None)
            bias = None if layer.qkv.bias is None else layer.qkv.bias[rows]
            both = linear(states, layer.qkv.weight[rows], bias).view(len(states), 2 * kv_heads, layer.head_dim)
            key, value = both.split(kv_heads, 1)
            if layer.k_norm is not None:
                key = layer.k_norm(key)[1]
            attention.store(layer.layer, key.contiguous(), value, rope)

    def forward(self, inputs: DraftInputs) -> torch.Tensor:
        """Return normed states [T, H] of blocks of the next token and its masks; hidden is not read."""
        x, delta, rope = F.embedding(inputs.token_ids.flatten(), self.embedding), None, self.rotary(inputs.positions)
        for layer in self.layers:
            x, delta = layer(x, delta, rope, inputs.attention)
        states: torch.Tensor = self.norm(x, delta)[1]
        return states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, draft vocabulary] for hidden [T, H]."""
        return self.lm_head.product(hidden)


def serves(store: TensorStore) -> bool:
    """Whether the checkpoint's tensors have DFlash's names."""
    return {"fc.weight", "hidden_norm.weight", "layers.0.input_layernorm.weight"} <= store.names()


def aux_hidden_state_layers(store: TensorStore, num_target_layers: int) -> tuple[int, ...]:
    """Return which states of the target the draft reads, as the layers that they enter. target_layer_ids lists layers
    by their output, speculators' list by their input. Raises CheckpointError for states that the target does not
    have."""
    config = store.config
    if config.values.get(_INPUT_FIELD) is not None:
        return read_layers(config, _INPUT_FIELD, num_target_layers, by_output=False)
    fields = [(config.section("dflash_config"), _OUTPUT_FIELDS[0]), *((config, name) for name in _OUTPUT_FIELDS)]
    for section, name in fields:
        if section.values.get(name) is not None:
            return read_layers(section, name, num_target_layers, by_output=True)
    names = ", ".join((f"dflash_config.{_OUTPUT_FIELDS[0]}", *_OUTPUT_FIELDS, _INPUT_FIELD))
    raise CheckpointError(
        f"{config.place} must list the target layers that the draft reads, and has none of {names}. Restore the file."
    )


def load(store: TensorStore, target: TargetModel, *, dtype: torch.dtype, device: torch.device) -> DFlash:
    """Load the draft, ready to run. Raises CheckpointError."""
    return load_as(DFlash, store, target, dtype=dtype, device=device)


def load_as(kind: type[D], store: TensorStore, target: TargetModel, *, dtype: torch.dtype, device: torch.device) -> D:
    """Load a draft of this class, ready to run. Raises CheckpointError."""
    if (store.folder / "mask_embedding.pt").exists():
        raise CheckpointError(
            f"{store.folder} has mask_embedding.pt, which is not supported: masks would get another embedding. "
            "Write it into the embedding table."
        )
    for name, neutral in _FACTORS.items():
        store.config.section("dflash_config").require(name, neutral)
    config = _decoder(store, target, windows_are_causal=kind.windows_are_causal)
    model = config.model
    read = store.config.get("target_hidden_size", int, target.hidden_size)
    check_shared(store.folder, "target_hidden_size", read, target.hidden_size)
    # If the target's number of layers is unknown, only the number of its states is checked.
    layers = aux_hidden_state_layers(store, target.num_layers or MAX_LAYERS)
    check_aux_states(store, target, read, layers)
    vocabulary = read_vocabulary(store, target, model.vocab_size, device)
    weights = ScopedWeights(store, "", dtype, device)
    if not weights.has("lm_head.weight"):
        check_shared(f"{store.folder}, without a head,", "hidden_size", model.hidden_size, target.hidden_size)
    with torch.device("meta"):
        draft = kind(weights, config, vocabulary, target)
    draft = read_parameters(draft, weights)
    draft.mask_token_id = require_mask_token(store, vocabulary.known, "a DFlash draft predicts masks")
    draft.block_size = _block_size(store, draft.first_place)
    store.refuse_unused()
    return draft


def _decoder(store: TensorStore, target: TargetModel, *, windows_are_causal: bool) -> DecoderConfig:
    """Read the layers, each with its window and whether it is causal.

    A window is counted from each token, as in engines. `speculators` trains with one counted from the block's first.
    """
    fields = decoder_fields(store)
    config = read_decoder(fields, no_windows, max_positions=target.max_positions)
    section, count = store.config.section("dflash_config"), config.model.num_layers
    enabled, window = fields.optional("use_sliding_window", bool), fields.optional("sliding_window", int)
    # If nothing says so, a window is on only if layers are listed as sliding.
    kinds = read_layer_kinds(fields, count) or default_kinds(fields, count, window if enabled else None)
    everywhere = section.get("use_swa", bool, False) and SLIDING not in kinds
    sliding = [everywhere or kind == SLIDING for kind in kinds]
    own_window = section.optional("swa_window_size", int)
    window = own_window or (None if enabled is False else window)
    if window is not None and window < 1:
        name, place = ("swa_window_size", section.place) if own_window else ("sliding_window", fields.place)
        raise CheckpointError(f"{name} in {place} must be 1 or more, got {window}. Restore the file.")
    if any(sliding) and window is None:
        raise CheckpointError(
            f"{fields.place} has sliding-window layers, but neither sliding_window nor dflash_config.swa_window_size, "
            "or use_sliding_window is false. Restore the file."
        )
    is_causal = store.config.optional("is_causal", bool)
    is_causal = section.optional("causal", bool) if is_causal is None else is_causal
    non_causal = store.config.get("sliding_window_non_causal", bool, not windows_are_causal)  # speculators
    causal = [kind == SLIDING and not non_causal for kind in kinds]
    return DecoderConfig(
        model=config.model,
        scaling=config.scaling,
        windows=tuple(window if slides else None for slides in sliding),
        causal=tuple(causal if is_causal is None else [is_causal] * count),
    )


def _block_size(store: TensorStore, first_place: int) -> int | None:
    """Return block_size, or None if config.json has none. Raises CheckpointError for a block that predicts nothing."""
    for section in (store.config, store.config.section("dflash_config")):
        if (size := section.optional("block_size", int)) is None:
            continue
        if size <= first_place:
            raise CheckpointError(
                f"block_size in {section.place} must be {first_place + 1} or more, got {size}. Restore the file."
            )
        return size
    return None


def _samples_from_anchor(store: TensorStore) -> bool:
    """Whether the block's first token also predicts one."""
    nested = store.config.section("dflash_config").optional("sample_from_anchor", bool)
    return store.config.get("sample_from_anchor", bool, False) if nested is None else nested
