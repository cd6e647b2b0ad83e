"""A target with random weights whose draft reads the hidden states of several layers."""

from __future__ import annotations

import torch

from spec_decode.models import LlamaTarget
from spec_decode.models.attention import Attention
from spec_decode.models.base import TargetStates
from spec_decode.models.config import ModelConfig


class AuxStatesTarget(LlamaTarget):
    """Hands on the states that enter num_states of its layers, evenly spread: [T, num_states * H]."""

    def __init__(self, config: ModelConfig, num_states: int) -> None:
        super().__init__(config)
        self.target_states_size = num_states * config.hidden_size
        self.aux_layers = [1 + index * (config.num_layers - 1) // num_states for index in range(num_states)]

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> TargetStates:
        """token_ids and positions int64 [T]."""
        x, delta, rope = self.embed(token_ids), None, self.rotary(positions)
        entered: list[torch.Tensor] = []
        for index, layer in enumerate(self.layers):
            if index in self.aux_layers:
                entered.append(x if delta is None else x + delta)
            x, delta = layer(x, delta, rope, attention)
        hidden: torch.Tensor = self.norm(x, delta)[1]
        return TargetStates(hidden, torch.cat(entered, -1))
