"""Base classes and checks for drafts loaded from published checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, cast

import torch

from spec_decode.model_api import DraftModel, LayerGroup, TargetModel
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import ScopedWeights, TensorStore
from spec_decode.models.layers.linear import Embedding
from spec_decode.models.layers.rope import Rotary
from spec_decode.models.shared_target import SharedTarget

_LAYER_CONFIG = "transformer_layer_config"
"""The section of config.json in which `speculators` describes the layers."""


class AttentionConfig(Protocol):
    """Describes the attention of a draft's layers."""

    def layer_groups(self, page_size: int, dtype: torch.dtype) -> list[LayerGroup]:
        """Return every layer, each in one group."""
        ...


class DecoderDraft(DraftModel):
    """A draft of decoder layers. It uses its target's embedding if the checkpoint has none.

    A draft that reads the target's states accepts positions up to the target's limit: rotary angles need no training,
    and a wrong guess costs a round's time but does not change its text.
    """

    config: AttentionConfig

    def __init__(self, target: TargetModel, config: AttentionConfig, rotary: Rotary, embed: Embedding | None) -> None:
        """embed: the draft's own, of the target's vocabulary."""
        super().__init__()
        self.shared = SharedTarget(target)
        self.vocab_size, self.target_states_size = target.vocab_size, target.target_states_size
        self.config, self.rotary, self.embed = config, rotary, embed
        self.max_positions = len(rotary.table)

    @property
    def batch_invariant(self) -> bool:
        """Same as the target, whose modules the draft may share."""
        return self.shared.model.batch_invariant

    @property
    def embedding(self) -> torch.Tensor:
        """[V, H]."""
        return self.shared.embedding if self.embed is None else self.embed.weight

    def layer_groups(self, page_size: int) -> list[LayerGroup]:
        """Return the layers in groups of the same attention spec."""
        return self.config.layer_groups(page_size, self.embedding.dtype)


def read_embedding(weights: ScopedWeights, target: TargetModel, name: str, rows: int, hidden: int) -> Embedding | None:
    """Read a draft's embedding [rows, hidden]; None if the checkpoint has none.

    Raises CheckpointError if the draft needs the target's and that has another size or dtype.
    """
    if weights.has(name):
        embed: Embedding = Embedding.from_pretrained(weights.take(name, rows, hidden))
        return embed
    check_embedding(weights, target, hidden)
    return None


def decoder_fields(store: TensorStore) -> ConfigReader:
    """Return the fields of config.json that describe the layers: the top level, or an object inside it. `speculators`
    writes either."""
    if is_by_speculators(store) and "hidden_size" not in store.config.values:
        store.config.get(_LAYER_CONFIG, cast(Any, dict))
    for name in (_LAYER_CONFIG, "model"):  # speculators, vLLM's EAGLE
        if isinstance(store.config.values.get(name), dict):
            return store.config.section(name)
    return store.config


def is_by_speculators(store: TensorStore) -> bool:
    """Whether the library `speculators` wrote config.json; its field names differ from others'."""
    return store.config.optional("speculators_model_type", str) is not None


def read_layers(
    section: ConfigReader, name: str, num_target_layers: int, *, by_output: bool, default: list[int] | None = None
) -> tuple[int, ...]:
    """Read the list of target states under `name` as the layers that they enter: 0 to n for n layers, where n is the
    last layer's output.

    by_output  the list names layers by their output, 0 to n - 1, instead of by their input
    default    the list to use if the field is absent

    Raises CheckpointError for states that the target does not have.
    """
    listed = section.get(name, list, default)
    last = num_target_layers - by_output
    if not listed or not all(type(layer) is int and 0 <= layer <= last for layer in listed):
        raise CheckpointError(
            f"{name} in {section.place} must list layers of the target, 0 to {last}, got {listed}"
            f"{'' if section.values.get(name) else ', the default'}. Use a draft trained on this target."
        )
    return tuple(layer + by_output for layer in listed)


def check_shared(draft: str | Path, name: str, draft_value: int, target_value: int) -> None:
    """Raise CheckpointError unless `name` is the same in the draft and the target; the message calls the draft
    `draft`."""
    if draft_value != target_value:
        raise CheckpointError(
            f"{draft} has {name} {draft_value}, the target {target_value}; they must be equal. Use a draft trained on "
            "this target."
        )


def check_target(
    store: TensorStore,
    target: TargetModel,
    hidden_size: int,
    *,
    states_size: int | None = None,
    remedy: str = "Create the target with its last hidden states as target_hidden_states.",
) -> None:
    """Raise CheckpointError unless the target has the draft's hidden_size and target_hidden_states.

    states_size  dims of the states that the draft reads; None: those of the last hidden states
    remedy       how to create a target that returns these
    """
    states_size = states_size or hidden_size
    check_shared(store.folder, "hidden_size", hidden_size, target.hidden_size)
    if target.target_states_size != states_size:
        raise CheckpointError(
            f"the draft in {store.folder} reads target hidden states of size {states_size}, this target returns "
            f"{target.target_states_size}. {remedy}"
        )


def check_aux_states(store: TensorStore, target: TargetModel, hidden_size: int, layers: tuple[int, ...]) -> None:
    """As `check_target`, for a draft that reads the states entering these layers, each of hidden_size.

    Also raises CheckpointError if the target returns the states of other layers.
    """
    remedy = f"Create the target with {len(layers)} aux_hidden_state_layers."
    check_target(store, target, hidden_size, states_size=len(layers) * hidden_size, remedy=remedy)
    if target.aux_hidden_state_layers not in (None, layers):
        raise CheckpointError(
            f"the draft in {store.folder} reads target hidden states that enter layers {list(layers)}, this target "
            f"returns those that enter {list(target.aux_hidden_state_layers or ())}. {remedy}"
        )


def check_embedding(weights: ScopedWeights, target: TargetModel, hidden_size: int) -> None:
    """Raise CheckpointError if a draft that uses the target's embedding has another hidden size or dtype."""
    check_shared(f"{weights.store.folder}, without an embedding,", "hidden_size", hidden_size, target.hidden_size)
    if (embedding_dtype := SharedTarget(target).embedding.dtype) != weights.dtype:
        raise CheckpointError(
            f"the draft in {weights.store.folder} uses its target's embedding, in {embedding_dtype}, but dtype is "
            f"{weights.dtype}. Pass the target's dtype."
        )
