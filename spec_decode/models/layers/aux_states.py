"""The states of several target layers, fused into one.

Legend: T tokens, F dims of all layers' states together, H the draft's hidden size.
"""

from __future__ import annotations

import torch
from torch import nn

from spec_decode.models.layers.linear import Linear
from spec_decode.models.layers.rms_norm import RMSNorm


class AuxStates(nn.Module):
    """A projection of the concatenated states, after a norm over all, a norm for each, or none."""

    def __init__(self, sizes: tuple[int, int], hidden: int, eps: float, *, norm_all: bool, norm_each: bool) -> None:
        """sizes: F, and dims of one layer's states."""
        super().__init__()
        total, per_layer = sizes
        self.input_norm = RMSNorm(total, eps) if norm_all else None
        self.fc_norm = nn.ModuleList(RMSNorm(per_layer, eps) for _ in range(total // per_layer * norm_each))
        self.fc = Linear(total, hidden)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map states [T, F] to [T, H]."""
        if self.input_norm is not None:
            states = self.input_norm(states)[1]
        if self.fc_norm:
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(part)[1] for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc.product(states)
