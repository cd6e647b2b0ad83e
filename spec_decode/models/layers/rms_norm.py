"""The RMS norm, which adds the residual's delta first."""

from __future__ import annotations

import torch
from torch import nn

from spec_decode.models.checkpoints.store import ScopedWeights
from spec_decode.models.kernels.add_rms_norm import add_rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    @classmethod
    def read(cls, weights: ScopedWeights, name: str, size: int, eps: float, offset: float = 0.0) -> RMSNorm:
        """The norm whose weight [size] is the tensor of that name. Raises CheckpointError.

        offset: what is added to the tensor, where it says how far the weight is from there; the sum is kept in fp32.
        """
        norm = cls(size, eps)
        norm.weight = weights.parameter(name, size, dtype=torch.float32 if offset else None)
        norm.weight.data += offset
        return norm

    def forward(self, x: torch.Tensor, delta: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """x + delta (x where there is none) and its norm, both [T, size]."""
        return add_rms_norm(x, delta, self.weight, self.eps)
