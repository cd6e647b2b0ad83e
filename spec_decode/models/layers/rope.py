"""Rotary embedding with the scalings of published checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from attn_backends.kernels.rope import Rope
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.errors import CheckpointError
from spec_decode.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearScaling:
    """Positions are `factor` times closer together (Chen et al., 2023, position interpolation)."""

    factor: float

    def scaled(self, inverse: torch.Tensor) -> torch.Tensor:
        return inverse / self.factor


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's: waves that turn fewer than low_freq_factor times in the original context are stretched by factor,
    those that turn more than high_freq_factor times stay, and those between go over smoothly."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float

    def scaled(self, inverse: torch.Tensor) -> torch.Tensor:
        turns = self.original_max_position_embeddings * inverse / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0, 1)
        return inverse * (kept + (1 - kept) / self.factor)


Scaling = LinearScaling | Llama3Scaling


class Rotary(nn.Module):
    """The angles of rotary embedding (RoFormer, eq. 34): table fp32 [max_positions, rotary_dim] of cos | sin."""

    table: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        half = config.rotary_dim // 2
        inverse = config.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(config.max_positions, dtype=torch.float64)[:, None] * inverse
        table = torch.cat([angle.cos(), angle.sin()], -1).float()
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: torch.Tensor) -> Rope:
        """The rotation of heads of rotary_dim dims to positions int64 [T]."""
        return Rope(positions, self.table)


class ScaledRotary(Rotary):
    """Rotary embedding whose angles are scaled; scaling None leaves them."""

    def __init__(self, config: ModelConfig, scaling: Scaling | None) -> None:
        super().__init__(config)
        if scaling is not None:
            half = config.rotary_dim // 2
            inverse = config.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
            angle = torch.arange(config.max_positions, dtype=torch.float64)[:, None] * scaling.scaled(inverse)
            self.table = torch.cat([angle.cos(), angle.sin()], -1).float()


def read_rope(config: ConfigReader) -> tuple[float, Scaling | None]:
    """rope_theta and the scaling, from rope_parameters or, as older configs have them, rope_theta and rope_scaling."""
    section = config.section("rope_parameters" if config.values.get("rope_parameters") else "rope_scaling")
    theta = section.get("rope_theta", float, config.get("rope_theta", float, 10000.0))
    for fields in (section, config):
        if (part := fields.get("partial_rotary_factor", float, 1.0)) != 1.0:
            raise CheckpointError(
                f"partial_rotary_factor in {fields.place} must be 1, got {part}: this model rotates whole heads; "
                "nothing was loaded. Use a checkpoint without it."
            )
    return theta, _read_scaling(section)


def _read_scaling(section: ConfigReader) -> Scaling | None:
    kind = section.get("rope_type", str, section.get("type", str, "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=_positive(section, "factor"))
    if kind == "llama3":
        return _read_llama3(section)
    raise CheckpointError(
        f"rope_type in {section.place} must be default, linear or llama3, got {kind!r}; angles would be wrong, so "
        "nothing was loaded. Use a checkpoint with one of those."
    )


def _read_llama3(section: ConfigReader) -> Llama3Scaling:
    low, high = _positive(section, "low_freq_factor"), _positive(section, "high_freq_factor")
    if not low < high:
        raise CheckpointError(
            f"low_freq_factor must be below high_freq_factor in {section.place}, got {low} and {high}; nothing was "
            "loaded. Restore the file."
        )
    return Llama3Scaling(
        factor=_positive(section, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_positive(section, "original_max_position_embeddings"),
    )


def _positive(section: ConfigReader, name: str) -> float:
    value = section.get(name, float)
    if not value > 0:
        raise CheckpointError(
            f"{name} in {section.place} must be positive, got {value}; nothing was loaded. Restore the file."
        )
    return value
