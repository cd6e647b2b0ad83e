"""What drafts that predict a token more, from a layer trained with the target, have in common.

Legend: T tokens, H hidden size. Floats are in the draft's dtype.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from spec_decode.models.base import TargetModel
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.errors import CheckpointError
from spec_decode.models.checkpoints.scoped_weights import ScopedWeights
from spec_decode.models.kernels.linear import linear
from spec_decode.models.one_layer_draft import OneLayerDraft


class MtpDraft(OneLayerDraft):
    """A draft that reads the state it hands on, and uses its target's head where the checkpoint has none for it."""

    group_name: ClassVar[str] = "mtp"

    def __init__(
        self,
        weights: ScopedWeights,
        target: TargetModel,
        *,
        embedding: str,
        head: str,
        norms: tuple[str, str] = ("enorm.weight", "hnorm.weight"),
        norm_offset: float = 0.0,
        config: ConfigReader | None = None,
    ) -> None:
        """As OneLayerDraft; head: the name of the layer's own [vocab, H] matrix, where there is one."""
        config = config or weights.store.config
        super().__init__(weights, target, embedding=embedding, norms=norms, norm_offset=norm_offset, config=config)
        self.max_positions = config.get("max_position_embeddings", int)
        self.hidden_size = self.target_states_size
        self.head = None
        if weights.has(head):
            self.head = weights.parameter(head, self.vocab_size, config.get("hidden_size", int))

    def projected(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [T, vocab_size] of normed states [T, H]."""
        return self._target[0].logits(normed) if self.head is None else linear(normed, self.head)


def check_published_form(config: ConfigReader) -> None:
    """Raise CheckpointError for a checkpoint without such a layer, and one with other activations."""
    if config.get("num_nextn_predict_layers", int, 0) < 1:
        raise CheckpointError(
            f"num_nextn_predict_layers in {config.place} must be at least 1, got "
            f"{config.values.get('num_nextn_predict_layers')}; the checkpoint has no layer that drafts. "
            "Use one that was published with it."
        )
    config.require("hidden_act", "silu")
    config.require("attention_bias", False)
