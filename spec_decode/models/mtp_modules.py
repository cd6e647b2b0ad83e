"""A chain of multi-token-prediction layers, each of which drafts one token of the round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from spec_decode.model_api import DraftInputs, LayerGroup, ModuleDraft
from spec_decode.models.recurrent_draft import RecurrentDraft


class MtpModules(ModuleDraft):
    """At position p, module k reads the token at p + k and the state of module k - 1 at p (for the first module, the
    target's state), and returns a state that predicts the token at p + k + 1."""

    def __init__(self, modules: Sequence[RecurrentDraft]) -> None:
        """modules: all of the same shape; module i has layer index i."""
        super().__init__()
        first = modules[0]
        self.chain = nn.ModuleList(modules)
        self.vocab_size, self.max_positions = first.vocab_size, first.max_positions
        self.hidden_size, self.target_states_size = first.hidden_size, first.target_states_size

    @property
    def prediction_modules(self) -> tuple[RecurrentDraft, ...]:
        """The modules of the chain."""
        return tuple(cast(RecurrentDraft, module) for module in self.chain)

    @property
    def batch_invariant(self) -> bool:
        """Whether all modules are."""
        return all(module.batch_invariant for module in self.prediction_modules)

    def layer_groups(self, page_size: int) -> list[LayerGroup]:
        """Return one group with one layer for each module."""
        [group] = self.prediction_modules[0].layer_groups(page_size)
        return [replace(group, layers=tuple(range(len(self.chain))))]

    def forward(self, inputs: DraftInputs) -> torch.Tensor:
        """Run the first module: return states [T, H]."""
        return self.prediction_modules[0].forward(inputs)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the first module's logits [T, vocab_size] for hidden [T, H]."""
        return self.prediction_modules[0].logits(hidden)
