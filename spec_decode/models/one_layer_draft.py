"""What drafts of one layer over a token's embedding and the state before it have in common.

Legend: T tokens, H hidden size. Floats are in the draft's dtype.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from spec_decode.models.base import LayerGroup, TargetModel
from spec_decode.models.checkpoints.scoped_weights import ScopedWeights
from spec_decode.models.draft import check_embedding, target_embedding
from spec_decode.models.kept_rows import KeptRowsDraft
from spec_decode.models.layers.mla_attention import MlaAttention
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.layers.window_attention import WindowAttention


class OneLayerDraft(KeptRowsDraft):
    """A draft whose layer reads its own weights, and which uses its target's embedding where it brings none."""

    group_name: ClassVar[str] = "layers"
    attention: MlaAttention | WindowAttention
    layer: int = 0
    """Its own among the layers of a draft."""

    def __init__(self, weights: ScopedWeights, target: TargetModel, *, embedding: str, norms: tuple[str, str]) -> None:
        """embedding: the name of its own [vocab, H] matrix, where there is one. norms: of the embedding and of the
        state. Raises CheckpointError."""
        super().__init__()
        config = weights.store.config
        vocab, hidden = config.get("vocab_size", int), config.get("hidden_size", int)
        self.vocab_size, self.target_states_size = vocab, target.target_states_size
        self.embed = weights.parameter(embedding, vocab, hidden) if weights.has(embedding) else None
        if self.embed is None:
            check_embedding(weights, target, hidden)
        # A tuple hides the target's modules from this module's own parameters.
        self._target = (target,)
        eps = config.get("rms_norm_eps", float)
        self.embedding_norm, self.state_norm = (RMSNorm.read(weights, name, hidden, eps) for name in norms)

    @property
    def batch_invariant(self) -> bool:
        """As far as the target, whose modules it may share."""
        return self._target[0].batch_invariant

    def layer_groups(self, page_size: int) -> list[LayerGroup]:
        """The one layer."""
        spec = self.attention.shape.spec(page_size, self.state_norm.weight.dtype)
        return [LayerGroup(name=self.group_name, spec=spec, layers=(self.layer,))]

    @property
    def embedding(self) -> torch.Tensor:
        """[V, H]."""
        return target_embedding(self._target[0]) if self.embed is None else self.embed
