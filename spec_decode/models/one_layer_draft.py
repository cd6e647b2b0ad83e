"""Base class of drafts with one layer over a token's embedding and the state before it.

Legend: T tokens, H hidden size. Floats are in the draft's dtype.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from spec_decode.model_api import DraftModel, LayerGroup, TargetModel
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.store import ScopedWeights
from spec_decode.models.draft import check_embedding, target_embedding
from spec_decode.models.layers.grouped_attention import GroupedAttention
from spec_decode.models.layers.mla_attention import MlaAttention
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.layers.window_attention import WindowAttention


class OneLayerDraft(DraftModel):
    """A one-layer draft that uses its target's embedding if the checkpoint has none."""

    group_name: ClassVar[str] = "layers"
    attention: MlaAttention | WindowAttention | GroupedAttention
    layer: int = 0
    """The index of this layer among a draft's layers."""

    def __init__(
        self,
        weights: ScopedWeights,
        target: TargetModel,
        *,
        embedding: str,
        norms: tuple[str, str],
        norm_offset: float = 0.0,
        config: ConfigReader | None = None,
    ) -> None:
        """Raises CheckpointError.

        embedding    name of the checkpoint's [vocab, H] embedding, which may be absent
        norms        names of the norms of the embedding and of the state
        norm_offset  for both norms: see RMSNorm.read
        config       the section that describes the layer; None: all of config.json
        """
        super().__init__()
        config = config or weights.store.config
        self.vocab_size, self.target_states_size = target.vocab_size, target.target_states_size
        rows, hidden = max(config.get("vocab_size", int), self.vocab_size), config.get("hidden_size", int)
        self.embed = weights.parameter(embedding, rows, hidden) if weights.has(embedding) else None
        if self.embed is None:
            check_embedding(weights, target, hidden)
        # A tuple hides the target's modules from this module's own parameters.
        self._target = (target,)
        eps = config.positive("rms_norm_eps")
        self.embedding_norm, self.state_norm = (RMSNorm.read(weights, name, hidden, eps, norm_offset) for name in norms)
        self._dtype = weights.dtype

    @property
    def batch_invariant(self) -> bool:
        """Same as the target, whose modules the draft may share."""
        return self._target[0].batch_invariant

    def layer_groups(self, page_size: int) -> list[LayerGroup]:
        """Return the one layer in one group."""
        spec = self.attention.shape.spec(page_size, self._dtype)
        return [LayerGroup(name=self.group_name, spec=spec, layers=(self.layer,))]

    @property
    def embedding(self) -> torch.Tensor:
        """[V, H]."""
        return target_embedding(self._target[0]) if self.embed is None else self.embed
