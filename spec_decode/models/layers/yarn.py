"""Rotary angles of models with latent attention: plain, or stretched by YaRN (Peng et al., 2023, arXiv:2309.00071)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """Waves that turn fewer than beta_slow times in the original context are stretched by factor, those that turn more
    than beta_fast times stay, and those between go over smoothly.

    mscale and mscale_all_dim are DeepSeek's: the first scales rotated dims, the second whole heads, the two relative to
    each other.
    """

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def stretched(self, inverse: torch.Tensor, theta: float) -> torch.Tensor:
        """Inverse wave lengths fp64 [R / 2] of plain rotary embedding; those of this one."""
        half = inverse.shape[0]

        def pair_that_turns(times: float) -> float:
            return half * math.log(self.original_positions / (2 * math.pi * times)) / math.log(theta)

        first = max(math.floor(pair_that_turns(self.beta_fast)), 0)
        last = min(math.ceil(pair_that_turns(self.beta_slow)), 2 * half - 1)
        width = max(last - first, 0.001)
        share = ((torch.arange(half, dtype=inverse.dtype) - first) / width).clamp(0, 1)
        return inverse * (1 - share + share / self.factor)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary embedding of the last `dims` dims of a head."""

    dims: int
    theta: float
    yarn: Yarn | None = None

    def table(self, positions: int) -> torch.Tensor:
        """fp32 [positions, dims] of cos | sin, as latent_rotary takes it."""
        half = self.dims // 2
        inverse = self.theta ** -(torch.arange(half, dtype=torch.float64) / half)
        amplitude = 1.0
        if self.yarn is not None:
            inverse, amplitude = self.yarn.stretched(inverse, self.theta), self.yarn.amplitude
        angle = torch.arange(positions, dtype=torch.float64)[:, None] * inverse
        return (torch.cat([angle.cos(), angle.sin()], -1) * amplitude).float()


def read_rope(config: ConfigReader, dims: int) -> Rope:
    """From rope_parameters or, as older configs have them, rope_theta and rope_scaling."""
    section = config.section("rope_parameters" if config.values.get("rope_parameters") else "rope_scaling")
    theta = section.get("rope_theta", float, config.get("rope_theta", float, 10000.0))
    kind = section.get("rope_type", str, section.get("type", str, "default"))
    if kind not in ("default", "yarn"):
        raise CheckpointError(
            f"rope_type in {section.place} must be default or yarn, got {kind!r}; angles would be wrong, so nothing "
            "was loaded. Use a checkpoint with one of those."
        )
    if theta <= 1 or dims < 2 or dims % 2:
        raise CheckpointError(
            f"rotary embedding needs a rope_theta above 1 and an even number of dims, {config.place} says {theta} and "
            f"qk_rope_head_dim {dims}; nothing was loaded. Restore the file."
        )
    return Rope(dims=dims, theta=theta, yarn=_read_yarn(section) if kind == "yarn" else None)


def _read_yarn(section: ConfigReader) -> Yarn:
    factor = section.get("factor", float)
    original = section.get("original_max_position_embeddings", int)
    if factor < 1 or original < 1:
        raise CheckpointError(
            f"yarn needs a factor and original_max_position_embeddings of at least 1, {section.place} says {factor} "
            f"and {original}; nothing was loaded. Restore the file."
        )
    return Yarn(
        factor=factor,
        original_positions=original,
        beta_fast=section.get("beta_fast", float, 32.0),
        beta_slow=section.get("beta_slow", float, 1.0),
        mscale=section.get("mscale", float, 1.0),
        mscale_all_dim=section.get("mscale_all_dim", float, 0.0),
    )
