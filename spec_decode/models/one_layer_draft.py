"""What drafts of one layer over a token's embedding and the state before it have in common.

Legend: T tokens, H hidden size. Floats are in the draft's dtype.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from spec_decode.models.base import KeptRowsDraft, LayerGroup, TargetModel
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.store import ScopedWeights
from spec_decode.models.draft import check_embedding, target_embedding
from spec_decode.models.layers.grouped_attention import GroupedAttention
from spec_decode.models.layers.mla_attention import MlaAttention
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.layers.window_attention import WindowAttention


class OneLayerDraft(KeptRowsDraft):
    """A draft whose layer reads its own weights, and which uses its target's embedding where it brings none."""

    group_name: ClassVar[str] = "layers"
    attention: MlaAttention | WindowAttention | GroupedAttention
    layer: int = 0
    """Its own among the layers of a draft."""

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

        embedding    the name of its own [vocab, H] matrix, where there is one
        norms        of the embedding and of the state
        norm_offset  of both: see RMSNorm.read
        config       what describes the layer; None: all of config.json
        """
        super().__init__()
        config = config or weights.store.config
        vocab, hidden = config.get("vocab_size", int), config.get("hidden_size", int)
        self.vocab_size, self.target_states_size = vocab, target.target_states_size
        self.embed = weights.parameter(embedding, vocab, hidden) if weights.has(embedding) else None
        if self.embed is None:
            check_embedding(weights, target, hidden)
        # A tuple hides the target's modules from this module's own parameters.
        self._target = (target,)
        eps = config.positive("rms_norm_eps")
        self.embedding_norm, self.state_norm = (RMSNorm.read(weights, name, hidden, eps, norm_offset) for name in norms)
        self._dtype = weights.dtype

    @property
    def batch_invariant(self) -> bool:
        """As far as the target, whose modules it may share."""
        return self._target[0].batch_invariant

    def layer_groups(self, page_size: int) -> list[LayerGroup]:
        """The one layer."""
        spec = self.attention.shape.spec(page_size, self._dtype)
        return [LayerGroup(name=self.group_name, spec=spec, layers=(self.layer,))]

    @property
    def embedding(self) -> torch.Tensor:
        """[V, H]."""
        return target_embedding(self._target[0]) if self.embed is None else self.embed
