"""What drafts that predict a token more, from a layer trained with the target, have in common.

Legend: T tokens, H hidden size. Floats are in the draft's dtype.
"""

from __future__ import annotations

import torch

from spec_decode.models.base import LayerGroup, TargetModel
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.errors import CheckpointError
from spec_decode.models.checkpoints.scoped_weights import ScopedWeights
from spec_decode.models.draft import check_embedding, target_embedding
from spec_decode.models.kept_rows import KeptRowsDraft
from spec_decode.models.kernels.linear import linear
from spec_decode.models.layers.mla_attention import MlaAttention
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.layers.window_attention import WindowAttention


class MtpDraft(KeptRowsDraft):
    """A draft of one layer, which uses its target's embedding and head where the checkpoint has none for it."""

    attention: MlaAttention | WindowAttention
    layer: int = 0
    """Its own among the layers of a draft."""

    def __init__(self, weights: ScopedWeights, target: TargetModel, *, embedding: str, head: str) -> None:
        """embedding and head: the names of the layer's own [vocab, H] matrices, where there are any."""
        super().__init__()
        config = weights.store.config
        vocab, hidden = config.get("vocab_size", int), config.get("hidden_size", int)
        self.vocab_size, self.max_positions = vocab, config.get("max_position_embeddings", int)
        self.hidden_size = self.target_states_size = target.target_states_size
        self.embed = weights.parameter(embedding, vocab, hidden) if weights.has(embedding) else None
        self.head = weights.parameter(head, vocab, hidden) if weights.has(head) else None
        if self.embed is None:
            check_embedding(weights, target)
        # A tuple hides the target's modules from this module's own parameters.
        self._target = (target,)
        eps = config.get("rms_norm_eps", float)
        self.embedding_norm = RMSNorm.read(weights, "enorm.weight", hidden, eps)
        self.state_norm = RMSNorm.read(weights, "hnorm.weight", hidden, eps)

    @property
    def batch_invariant(self) -> bool:
        """As far as the target, whose modules it may share."""
        return self._target[0].batch_invariant

    def layer_groups(self, page_size: int) -> list[LayerGroup]:
        """The one layer."""
        spec = self.attention.shape.spec(page_size, self.state_norm.weight.dtype)
        return [LayerGroup(name="mtp", spec=spec, layers=(self.layer,))]

    @property
    def embedding(self) -> torch.Tensor:
        """[V, H]."""
        return target_embedding(self._target[0]) if self.embed is None else self.embed

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
