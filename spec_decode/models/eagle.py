"""The draft: an EAGLE-style single layer over the target's hidden states (Li et al., 2024, section 3)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from spec_decode.models.config import ModelConfig
from spec_decode.models.latent import LatentDecoderLayer
from spec_decode.models.layers import Attend, DecoderLayer, RMSNorm, Rotary
from spec_decode.models.llama import LlamaTarget
from spec_decode.ops.embed_concat import embed_concat


class DraftModel(Protocol):
    """What the drafter needs of a draft model."""

    config: ModelConfig

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Hidden states [T, H] that predict the token after token_ids, from them and the hidden states before them."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, H]; logits [T, vocab_size]."""
        ...


class EagleDraft(nn.Module):
    """At position p: the token at p + 1 and the hidden state at p give a hidden state that predicts the token at p + 2.

    Embedding and output projection are the target's own modules, shared, not copied.
    """

    def __init__(self, config: ModelConfig, target: LlamaTarget) -> None:
        super().__init__()
        self.config = config
        self.fuse = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        layer = DecoderLayer if config.latent is None else LatentDecoderLayer
        self.layer = layer(config, 0)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.rotary = Rotary(config)
        # A tuple hides the target's modules from this module's own parameters.
        self._shared = (target.embed, target.lm_head)

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """token_ids, positions int64 [T], hidden [T, H]; normed hidden states [T, H]."""
        x = self.fuse(embed_concat(token_ids, self._shared[0].weight, hidden))
        x, delta = self.layer(x, None, positions, self.rotary, attend)
        hidden_states: torch.Tensor = self.norm(x, delta)[1]
        return hidden_states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, H]; logits [T, vocab_size]."""
        out: torch.Tensor = self._shared[1](hidden)
        return out
