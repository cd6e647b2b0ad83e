"""Manifold-constrained hyper-connections, DeepSeek-V4's residual (mHC, arXiv:2512.24880).

Legend: T tokens, S streams, H hidden size; streams are in the model's dtype. A token's residual is S streams. A block
reads a weighted sum of them, its output is added to each stream with that stream's weight, and a matrix whose rows and
columns sum to 1 mixes the streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from attn_backends.kernels.linear.skinny_linear import wide_linear
from spec_decode.models.checkpoints.store import ScopedWeights, frozen
from spec_decode.models.kernels.hyper_connections import collapse_streams, read_streams

M = TypeVar("M", bound="_Mixer")


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperShape:
    """Sizes and constants of hyper-connections."""

    streams: int
    hidden: int
    iterations: int
    """Rounds of Sinkhorn normalisation."""
    eps: float
    norm_eps: float

    @property
    def mixes(self) -> int:
        """Coefficients of one block's connection: S to read, S to write, S x S to mix."""
        return self.streams * (2 + self.streams)


class _Mixer(nn.Module):
    def __init__(self, shape: HyperShape, projection: torch.Tensor, scale: torch.Tensor, base: torch.Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.projection, self.scale, self.base = frozen(projection), frozen(scale), frozen(base)

    @classmethod
    def from_weights(cls: type[M], weights: ScopedWeights, name: str, shape: HyperShape, rows: int, scales: int) -> M:
        """Read name_fn, _scale and _base in fp32 for any model dtype: the coefficients are computed in fp32."""
        sizes = {"fn": (rows, shape.streams * shape.hidden), "scale": (scales,), "base": (rows,)}
        return cls(shape, *(weights.take(f"{name}_{part}", *size, dtype=torch.float32) for part, size in sizes.items()))

    def mixes(self, streams: torch.Tensor) -> torch.Tensor:
        """Return projection @ x / rms(x), fp32 [T, rows of projection], where x is a token's row of streams [T, S, H],
        flattened."""
        return wide_linear(streams.flatten(1), self.projection, norm_eps=self.shape.norm_eps)


class HyperConnection(_Mixer):
    """The connection of one block: projection fp32 [mixes, S H], scale fp32 [3] and base fp32 [mixes]."""

    def read(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the block's input [T, H] for streams [T, S, H], and fp32 [T, S] and [T, S, S] for `write_streams`."""
        iterations, eps = self.shape.iterations, self.shape.eps
        return read_streams(streams, self.mixes(streams), self.scale, self.base, iterations=iterations, eps=eps)


class HyperHead(_Mixer):
    """Collapses the streams before a head: projection fp32 [S, S H], scale fp32 [1] and base fp32 [S]."""

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Collapse streams [T, S, H] to [T, H]."""
        return collapse_streams(streams, self.mixes(streams), self.scale, self.base, eps=self.shape.eps)
