"""YaRN (Peng et al., 2023, arXiv:2309.00071), as models with latent attention stretch their rotary embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.errors import CheckpointError
from spec_decode.models.layers.rope import RopeConfig, read_rope


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """Waves that turn fewer than beta_slow times in the original context are stretched by factor, those that turn more
    than beta_fast times stay, and those between go over smoothly.

    mscale and mscale_all_dim are DeepSeek's: the first scales rotated dims, the second whole heads, the two relative to
    each other.
    """

    theta: float
    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def scaled(self, frequencies: torch.Tensor) -> torch.Tensor:
        """See `Scaling`."""
        half = frequencies.shape[0]

        def pair_that_turns(times: float) -> float:
            return half * math.log(self.original_positions / (2 * math.pi * times)) / math.log(self.theta)

        first = max(math.floor(pair_that_turns(self.beta_fast)), 0)
        last = min(math.ceil(pair_that_turns(self.beta_slow)), 2 * half - 1)
        width = max(last - first, 0.001)
        share = ((torch.arange(half, dtype=frequencies.dtype) - first) / width).clamp(0, 1)
        return frequencies * (1 - share + share / self.factor)

    @property
    def amplitude(self) -> float:
        """Factor on cos and sin."""
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    @property
    def softmax_factor(self) -> float:
        """Factor on the attention's scale."""
        return self._magnitude(self.mscale_all_dim) ** 2

    def _magnitude(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


def read_latent_rope(config: ConfigReader, dims: int) -> RopeConfig:
    """The rotary embedding of the last `dims` dims of a head, with YaRN or without. Raises CheckpointError."""
    theta, yarn = read_rope(config, {"yarn": _read_yarn})
    if theta <= 1 or dims < 2 or dims % 2:
        raise CheckpointError(
            f"rotary embedding needs a rope_theta above 1 and an even number of dims, {config.place} says {theta} and "
            f"qk_rope_head_dim {dims}. Restore the file."
        )
    return RopeConfig(dims=dims, theta=theta, scaling=yarn)


def _read_yarn(section: ConfigReader, theta: float) -> Yarn:
    factor = section.get("factor", float)
    original = section.get("original_max_position_embeddings", int)
    if factor < 1 or original < 1:
        raise CheckpointError(
            f"yarn needs a factor and original_max_position_embeddings of at least 1, {section.place} says {factor} "
            f"and {original}. Restore the file."
        )
    return Yarn(
        theta=theta,
        factor=factor,
        original_positions=original,
        beta_fast=section.get("beta_fast", float, 32.0),
        beta_slow=section.get("beta_slow", float, 1.0),
        mscale=section.get("mscale", float, 1.0),
        mscale_all_dim=section.get("mscale_all_dim", float, 0.0),
    )
