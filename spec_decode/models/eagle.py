"""The draft: an EAGLE-style single layer over the target's hidden states (Li et al., 2024, section 3)."""

from __future__ import annotations

import torch
from torch import nn

from spec_decode.models.base import Attend, DraftModel, LayerGroup
from spec_decode.models.config import ModelConfig
from spec_decode.models.kernels.embed_concat import embed_concat
from spec_decode.models.kernels.skinny_linear import embed_linear, is_skinny, linear
from spec_decode.models.latent import LatentDecoderLayer
from spec_decode.models.layers import DecoderLayer, RMSNorm, Rotary
from spec_decode.models.llama import LlamaTarget


class EagleDraft(DraftModel):
    """At position p: the token at p + 1 and the hidden state at p give a hidden state that predicts the token at p + 2.

    Embedding and output projection are the target's own modules, shared, not copied.
    """

    def __init__(self, config: ModelConfig, target: LlamaTarget) -> None:
        super().__init__()
        self.config = config
        self.vocab_size, self.max_positions = config.vocab_size, config.max_positions
        self.hidden_size = self.target_states_size = config.hidden_size
        self.fuse = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        layer = DecoderLayer if config.latent is None else LatentDecoderLayer
        self.layer = layer(config, 0)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.rotary = Rotary(config)
        # A tuple hides the target's modules from this module's own parameters.
        self._shared = (target.embed, target.lm_head)

    def layer_groups(self, page_size: int) -> list[LayerGroup]:
        """The one layer."""
        return self.config.layer_groups(page_size, self.fuse.weight.dtype)

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """token_ids, positions int64 [T], hidden [T, H]; normed hidden states [T, H]."""
        table = self._shared[0].weight
        if is_skinny(hidden, self.fuse.weight):
            x = embed_linear(token_ids, table, hidden, self.fuse.weight)
        else:
            x = self.fuse(embed_concat(token_ids, table, hidden))
        x, delta = self.layer(x, None, positions, self.rotary, attend)
        hidden_states: torch.Tensor = self.norm(x, delta)[1]
        return hidden_states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, H]; logits [T, vocab_size]."""
        return linear(hidden, self._shared[1].weight)
