"""What all drafts of published checkpoints share, and what those that read the target's hidden states do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from spec_decode.models.base import DraftModel, LayerGroup, TargetModel
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import ScopedWeights, TensorStore
from spec_decode.models.decoder_config import DecoderConfig
from spec_decode.models.layers.decoder_layer import DecoderLayer, LayerOptions
from spec_decode.models.layers.linear import Embedding
from spec_decode.models.layers.rope import RotaryEmbedding

_LAYER_CONFIG = "transformer_layer_config"
"""Where `speculators` describes the layers."""


class DecoderDraft(DraftModel):
    """A stack of decoder layers; made on the meta device, `read_parameters` gives it its parameters."""

    layers: nn.ModuleList

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_size, self.hidden_size = config.model.vocab_size, config.model.hidden_size
        self.max_positions = config.model.max_positions
        self.rotary = RotaryEmbedding(config.model, config.scaling)

    def layer_groups(self, page_size: int) -> list[LayerGroup]:
        """A group for each sliding window that layers have."""
        return self.config.layer_groups(page_size, next(self.parameters()).dtype)


class HiddenStatesDraft(DecoderDraft):
    """A draft that reads the target's hidden states, and uses the target's embedding if it brings none of its own.

    Positions go as far as the target's: rotary angles need no training, and a wrong guess costs a round's time, not its
    text.
    """

    def __init__(self, weights: ScopedWeights, config: DecoderConfig, target: TargetModel) -> None:
        """Raises CheckpointError where it needs the target's embedding, and that is of another size or dtype."""
        super().__init__(config)
        owns = weights.has("embed_tokens.weight")
        self.embed = Embedding(self.vocab_size, self.hidden_size) if owns else None
        if not owns:
            check_embedding(weights, target, self.hidden_size)
        # A tuple hides the target's modules from this module's own parameters.
        self._target = (target,)

    @property
    def batch_invariant(self) -> bool:
        """As far as the target, whose modules it may share."""
        return self._target[0].batch_invariant

    @property
    def embedding(self) -> torch.Tensor:
        """[V, H]."""
        return target_embedding(self._target[0]) if self.embed is None else self.embed.weight

    def stack(self, store: TensorStore, first: DecoderLayer) -> nn.ModuleList:
        """The first layer, and after it plain ones with what the checkpoint has in them."""
        model = self.config.model
        options = [LayerOptions.found(store, f"layers.{layer}.") for layer in range(1, model.num_layers)]
        return nn.ModuleList([first, *(DecoderLayer(model, layer, found) for layer, found in enumerate(options, 1))])


def target_embedding(target: TargetModel) -> torch.Tensor:
    """The target's token embedding [V, H]."""
    return cast(nn.Embedding, target.embed).weight


def decoder_fields(store: TensorStore) -> ConfigReader:
    """The part of config.json that describes the layers: its own fields, or those of an object inside it."""
    if is_by_speculators(store):
        store.config.get(_LAYER_CONFIG, cast(Any, dict))
    for name in (_LAYER_CONFIG, "model"):  # speculators, vLLM's EAGLE
        if isinstance(store.config.values.get(name), dict):
            return store.config.section(name)
    return store.config


def is_by_speculators(store: TensorStore) -> bool:
    """Whether the library `speculators` wrote config.json: it names the same things otherwise than others."""
    return store.config.optional("speculators_model_type", str) is not None


def draft_vocab(store: TensorStore, vocab_size: int) -> int:
    """Tokens that the draft scores; the target's vocab_size where config.json does not say it."""
    return store.config.get("draft_vocab_size", int, vocab_size)


def read_layers(
    section: ConfigReader, name: str, num_target_layers: int, *, left: bool, default: list[int] | None = None
) -> tuple[int, ...]:
    """The states of the target that the list under `name` says, by the layers they enter: 0 to n of n layers, where n
    leaves the last.

    left     the list names the layers that the states leave, 0 to n - 1; else those that they enter
    default  what it is taken for where it is left out

    Raises CheckpointError for states that the target does not have.
    """
    listed = section.get(name, list, default)
    most = num_target_layers - left
    if not listed or not all(type(layer) is int and 0 <= layer <= most for layer in listed):
        raise CheckpointError(
            f"{name} in {section.place} must list layers of the target, 0 to {most}, got {listed}"
            f"{'' if section.values.get(name) else ', which is what it is taken for where it is left out'}. "
            "Use a draft trained on this target."
        )
    return tuple(layer + left for layer in listed)


def check_shared(draft: str | Path, name: str, ours: int, theirs: int) -> None:
    """Refuse a draft, called `draft` in the message, whose `name` is not the target's: raises CheckpointError."""
    if ours != theirs:
        raise CheckpointError(
            f"a draft shares its target's {name}, {draft} has {ours} and the target {theirs}; what one hands to the "
            "other would mean nothing. Use a draft trained on this target."
        )


def check_target(
    store: TensorStore,
    target: TargetModel,
    vocab_size: int,
    hidden_size: int,
    *,
    states_size: int | None = None,
    remedy: str = "Make the target with its last hidden states as target_hidden_states.",
) -> None:
    """Refuse a target of another vocabulary or hidden size than the draft's, or with other target_hidden_states than
    the draft reads: raises CheckpointError.

    states_size  dims of the states that the draft reads; None: its last hidden states
    remedy       how to make a target that returns these
    """
    states_size = states_size or hidden_size
    check_shared(store.folder, "vocab_size", vocab_size, target.vocab_size)
    check_shared(store.folder, "hidden_size", hidden_size, target.hidden_size)
    if target.target_states_size != states_size:
        raise CheckpointError(
            f"the draft in {store.folder} reads target hidden states of size {states_size}, this target returns "
            f"{target.target_states_size}. {remedy}"
        )


def check_aux_states(
    store: TensorStore, target: TargetModel, vocab_size: int, hidden_size: int, layers: tuple[int, ...]
) -> None:
    """As `check_target`, for a draft that reads the target's states that enter these layers, each of hidden_size.

    Also refuses a target that says it returns the states of others: raises CheckpointError.
    """
    remedy = f"Make the target with the states of {len(layers)} layers: aux_hidden_state_layers says which."
    check_target(store, target, vocab_size, hidden_size, states_size=len(layers) * hidden_size, remedy=remedy)
    if target.aux_hidden_state_layers not in (None, layers):
        raise CheckpointError(
            f"the draft in {store.folder} reads target hidden states that enter layers {list(layers)}, this target "
            f"returns those that enter {list(target.aux_hidden_state_layers or ())}. {remedy}"
        )


def check_embedding(weights: ScopedWeights, target: TargetModel, hidden_size: int) -> None:
    """Refuse another hidden size and dtype than the target's for a draft that uses its embedding: raises
    CheckpointError."""
    name = "hidden_size (for want of an embedding of its own)"
    check_shared(weights.store.folder, name, hidden_size, target.hidden_size)
    if (theirs := target_embedding(target).dtype) != weights.dtype:
        raise CheckpointError(
            f"the draft in {weights.store.folder} uses its target's embedding, in {theirs}, and was asked for in "
            f"{weights.dtype}. Ask for the target's dtype."
        )
