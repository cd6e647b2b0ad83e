"""Gated feed-forward blocks, and loading them under a model family's tensor names.

Legend: T tokens, H hidden size, I intermediate size. Floats are in the weights' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from attn_backends.kernels.linear.fp8_weight import Weight
from attn_backends.kernels.linear.linear import gated_linear, linear
from spec_decode.models.checkpoints.store import ScopedWeights, frozen, held
from spec_decode.models.kernels.sigmoid_gate import sigmoid_gate


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """A family's names of the parts of a feed-forward, and of its router's bias, empty if there is none."""

    gate: str
    up: str
    down: str
    router_bias: str = ""


LLAMA_NAMES = Names(gate="gate_proj", up="up_proj", down="down_proj")
"""The names that most families use."""


class FeedForward(nn.Module):
    """down(swiglu(gate_up(x))): gate_up [2 I, H], gate first, and down [H, I]."""

    gate_up: Weight
    down: Weight

    def __init__(self, gate_up: Weight, down: Weight, limit: float | None = None) -> None:
        super().__init__()
        self.gate_up, self.down = held(gate_up), held(down)
        self.limit = limit

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return [T, H] for x [T, H], plus the residual [T, H] if given."""
        return linear(gated_linear(x, self.gate_up, self.limit), self.down, residual=residual)


class GatedFeedForward(FeedForward):
    """sigmoid(gate . x) times the feed-forward: gate [1, H]."""

    def __init__(self, gate: torch.Tensor, gate_up: Weight, down: Weight) -> None:
        super().__init__(gate_up, down)
        self.gate = frozen(gate)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See FeedForward; the residual is added ungated."""
        out = sigmoid_gate(super().forward(x), linear(x, self.gate))
        return out if residual is None else out + residual


def read_dense(
    weights: ScopedWeights, names: Names, hidden: int, intermediate: int, limit: float | None
) -> FeedForward:
    """Read a feed-forward with separately stored gate and up projections."""
    return FeedForward(*read_gate_up_down(weights, names, hidden, intermediate), limit)


def read_gate_up_down(weights: ScopedWeights, names: Names, hidden: int, intermediate: int) -> tuple[Weight, Weight]:
    """Read gate_up [2 I, H] and down [H, I]."""
    gate_up = weights.product([f"{names.gate}.weight", f"{names.up}.weight"], [intermediate] * 2, hidden)
    return gate_up, weights.product([f"{names.down}.weight"], [hidden], intermediate)
