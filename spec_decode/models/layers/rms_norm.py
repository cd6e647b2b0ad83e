"""RMS norm with the residual addition before it."""

from __future__ import annotations

import torch
from torch import nn

from attn_backends.kernels.add_rms_norm import add_rms_norm
from spec_decode.models.checkpoints.store import ScopedWeights


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in fp32."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        """offset: what checkpoints store is the weight minus this."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.offset = eps, offset

    @classmethod
    def read(cls, weights: ScopedWeights, name: str, size: int, eps: float, offset: float = 0.0) -> RMSNorm:
        """Read the norm whose weight [size] is in the tensor with this name. Raises CheckpointError."""
        norm = cls(size, eps, offset)
        norm.weight = norm.stored(weights, name)
        return norm

    def stored(self, weights: ScopedWeights, name: str) -> nn.Parameter:
        """Return the weight, from the tensor with this name. With an offset it stays in fp32. Raises
        CheckpointError."""
        weight = weights.parameter(name, len(self.weight), dtype=torch.float32 if self.offset else None)
        weight.data += self.offset
        return weight

    def forward(self, x: torch.Tensor, delta: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + delta (x if delta is None) and its norm, both [T, size]."""
        return add_rms_norm(x, delta, self.weight, self.eps)
