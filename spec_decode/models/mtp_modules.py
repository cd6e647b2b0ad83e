"""Several modules of multi-token prediction, as they are trained: in a chain (arXiv:2412.19437, section 2.2).

Legend: T tokens, H hidden size of the states handed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from spec_decode.models.attention import Attention
from spec_decode.models.base import LayerGroup, ModuleDraft
from spec_decode.models.mtp_draft import MtpDraft


class MtpModules(ModuleDraft):
    """At position p, module k reads the token at p + k and the state of module k - 1 at p, which for the first is the
    target's; its state there predicts the token at p + k + 1.
    """

    def __init__(self, modules: Sequence[MtpDraft]) -> None:
        """modules: of one shape, module i with layer i."""
        super().__init__()
        first = modules[0]
        self.chain = nn.ModuleList(modules)
        self.vocab_size, self.max_positions = first.vocab_size, first.max_positions
        self.hidden_size, self.target_states_size = first.hidden_size, first.target_states_size

    @property
    def prediction_modules(self) -> tuple[MtpDraft, ...]:
        """Those of the chain."""
        return tuple(cast(MtpDraft, module) for module in self.chain)

    @property
    def batch_invariant(self) -> bool:
        """As far as all modules are."""
        return all(module.batch_invariant for module in self.prediction_modules)

    def layer_groups(self, page_size: int) -> list[LayerGroup]:
        """One group of a layer for each module."""
        [group] = self.prediction_modules[0].layer_groups(page_size)
        return [replace(group, layers=tuple(range(len(self.chain))))]

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """The first module's: token_ids, positions int64 [T], hidden [T, H]; states [T, H]."""
        return self.prediction_modules[0].forward(token_ids, hidden, positions, attention)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The first module's: hidden [T, H]; logits [T, vocab_size]."""
        return self.prediction_modules[0].logits(hidden)
