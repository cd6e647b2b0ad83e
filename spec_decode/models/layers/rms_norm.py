"""RMS norm with the residual addition before it."""

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
        """Read the norm's weight [size] from the tensor with this name. Raises CheckpointError.

        offset: added to the tensor, for checkpoints that store the weight minus this offset; the sum stays in fp32.
        """
        norm = cls(size, eps)
        norm.weight = weights.parameter(name, size, dtype=torch.float32 if offset else None)
        norm.weight.data += offset
        return norm

    def forward(self, x: torch.Tensor, delta: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + delta (x if delta is None) and its norm, both [T, size]."""
        return add_rms_norm(x, delta, self.weight, self.eps)
