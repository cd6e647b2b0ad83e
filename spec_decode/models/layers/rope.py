"""Rotary embedding (RoFormer, eq. 34): tables of angles, plain or with the scalings of published checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from attn_backends.kernels.rope import Rope
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.config import ModelConfig

_MAX_TABLE = 2**31
"""The most angles in a table: a little over 10 million positions of 128 dims."""


class Scaling(Protocol):
    """Modifies the plain frequencies for a longer context."""

    @property
    def amplitude(self) -> float:
        """Factor on cos and sin."""
        return 1.0

    def scaled(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Scale plain frequencies, fp64 [dim / 2] in radians per position."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearScaling(Scaling):
    """Position interpolation (Chen et al., 2023): positions are `factor` times closer together."""

    factor: float

    def scaled(self, frequencies: torch.Tensor) -> torch.Tensor:
        """See `Scaling`."""
        return frequencies / self.factor


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling(Scaling):
    """Llama 3.1's scaling: waves that turn fewer than low_freq_factor times in the original context are stretched by
    factor, those that turn more than high_freq_factor times are kept, and those in between are interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float

    def scaled(self, frequencies: torch.Tensor) -> torch.Tensor:
        """See `Scaling`."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding of `dims` dims of a head."""

    dims: int
    theta: float
    scaling: Scaling | None = None

    def table(self, max_positions: int, head_dim: int | None = None) -> torch.Tensor:
        """Return fp32 [max_positions, dims] of cos | sin, or with head_dim D [max_positions, D], with angle 0 for
        unrotated dims. Raises CheckpointError for an unreasonably large table."""
        if not 0 < max_positions * self.dims <= _MAX_TABLE:
            raise CheckpointError(
                f"max_position_embeddings times the {self.dims} rotated dims must be 1 to {_MAX_TABLE}, got "
                f"{max_positions} positions. Restore config.json."
            )
        half = self.dims // 2
        frequencies, amplitude = self.theta ** -(torch.arange(half, dtype=torch.float64) / half), 1.0
        if self.scaling is not None:
            frequencies, amplitude = self.scaling.scaled(frequencies), self.scaling.amplitude
        angle = torch.arange(max_positions, dtype=torch.float64)[:, None] * frequencies
        cos, sin, still = angle.cos() * amplitude, angle.sin() * amplitude, ((head_dim or self.dims) - self.dims) // 2
        pad = nn.functional.pad
        return torch.cat([pad(cos, (0, still), value=1.0), pad(sin, (0, still))], -1).float()


class Rotary(nn.Module):
    """The angles for a model's layers: table fp32 [max_positions, P] of cos | sin, not part of the state dict."""

    table: torch.Tensor

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: torch.Tensor) -> Rope:
        """Return the rotation of P dims to positions int64 [T]."""
        return Rope(positions, self.table)

    def of_layers(self, positions: torch.Tensor, num_layers: int) -> Sequence[Rope]:
        """Return the rotation in each layer."""
        return [self(positions)] * num_layers


class RotaryEmbedding(Rotary):
    """The angles that a decoder's config describes. They are on the device of construction, or on the CPU if that is
    the meta device: no checkpoint contains them."""

    def __init__(self, config: ModelConfig, scaling: Scaling | None = None) -> None:
        rope = RopeConfig(dims=config.rotary_dim, theta=config.rope_theta, scaling=scaling)
        super().__init__(_placed_table(rope, config))


class WindowRotary(RotaryEmbedding):
    """The same with other angles in the layers that have a sliding window: window_table fp32 [max_positions, P]."""

    window_table: torch.Tensor

    def __init__(
        self, config: ModelConfig, scaling: Scaling | None, window: RopeConfig, windows: Sequence[int | None]
    ) -> None:
        """window: the rotation in the layers for which `windows`, which has an entry for each, is not None."""
        super().__init__(config, scaling)
        self.register_buffer("window_table", _placed_table(window, config), persistent=False)
        self.windowed = [each is not None for each in windows]

    def of_layers(self, positions: torch.Tensor, num_layers: int) -> Sequence[Rope]:
        """See Rotary."""
        full, window = self(positions), Rope(positions, self.window_table)
        return [window if windowed else full for windowed in self.windowed]


def _placed_table(rope: RopeConfig, config: ModelConfig) -> torch.Tensor:
    with torch.device("cpu"):
        table = rope.table(config.max_positions, config.head_dim if config.latent is None else None)
    device = torch.empty(0).device
    return table if device.type == "meta" else table.to(device)


ScalingReader = Callable[[ConfigReader, float], Scaling]
"""Reads a scaling from its section of config.json; the second argument is rope_theta. Raises CheckpointError."""


def rope_section(config: ConfigReader) -> ConfigReader:
    """Return the section of config.json for rotary embedding: rope_parameters or, in older files, rope_scaling."""
    return config.section("rope_parameters" if config.values.get("rope_parameters") else "rope_scaling")


def read_rope(config: ConfigReader, scalings: Mapping[str, ScalingReader]) -> tuple[float, Scaling | None]:
    """Read rope_theta, and the scaling with its rope_type's reader. Raises CheckpointError for an unknown type."""
    section = rope_section(config)
    if kinds := [name for name, value in section.values.items() if isinstance(value, dict)]:
        raise CheckpointError(
            f"{section.place} must be the same for all layers, got one for {' and one for '.join(kinds)}. "
            "Use a checkpoint with one rotary embedding."
        )
    theta = section.get("rope_theta", float, config.get("rope_theta", float, 10000.0))
    kind = section.get("rope_type", str, section.get("type", str, "default"))
    if kind == "default":
        return theta, None
    if kind not in scalings:
        *others, last = "default", *scalings
        raise CheckpointError(
            f"rope_type in {section.place} must be {', '.join(others)} or {last}, got {kind!r}. "
            "Use a checkpoint with one of those."
        )
    return theta, scalings[kind](section, theta)


def read_rotated_dims(config: ConfigReader, head_dim: int, fraction: float) -> int:
    """Read how many dims of a head are rotated. fraction: of a head, if the file does not say. Raises
    CheckpointError."""
    for section in (config, rope_section(config)):
        fraction = section.get("partial_rotary_factor", float, fraction)
    dims = int(head_dim * fraction)
    if dims % 2 or not 2 <= dims <= head_dim:
        raise CheckpointError(
            f"partial_rotary_factor in {config.place} must rotate an even number of 2 to {head_dim} dims, got "
            f"{fraction} of {head_dim}. Restore the file."
        )
    return dims


def _read_llama3(section: ConfigReader, _: float) -> Llama3Scaling:
    low, high = section.positive("low_freq_factor"), section.positive("high_freq_factor")
    if not low < high:
        raise CheckpointError(
            f"low_freq_factor must be below high_freq_factor in {section.place}, got {low} and {high}. "
            "Restore the file."
        )
    return Llama3Scaling(
        factor=section.positive("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=section.positive("original_max_position_embeddings"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """Waves that turn fewer than beta_slow times in the original context are stretched by factor, those that turn more
    than beta_fast times are kept, and those in between are interpolated.

    mscale and mscale_all_dim are DeepSeek's: mscale scales the rotated dims and mscale_all_dim whole heads, each
    relative to the other. attention_factor: the amplitude, instead of the one that follows from factor. truncate:
    whether the first and last pairs to interpolate are rounded to whole ones.
    """

    theta: float
    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def scaled(self, frequencies: torch.Tensor) -> torch.Tensor:
        """See `Scaling`."""
        half = frequencies.shape[0]

        def pair_index(turns: float) -> float:
            return half * math.log(self.original_positions / (2 * math.pi * turns)) / math.log(self.theta)

        first, last = pair_index(self.beta_fast), pair_index(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        width = last - first or 0.001
        share = ((torch.arange(half, dtype=frequencies.dtype) - first) / width).clamp(0, 1)
        return frequencies * (1 - share + share / self.factor)

    @property
    def amplitude(self) -> float:
        """Factor on cos and sin."""
        own = self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return own if self.attention_factor is None else self.attention_factor

    @property
    def softmax_factor(self) -> float:
        """Factor on the attention's softmax scale."""
        return self._magnitude(self.mscale_all_dim) ** 2

    def _magnitude(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


def read_latent_rope(config: ConfigReader, dims: int) -> RopeConfig:
    """Read the rotary embedding of the last `dims` dims of a head, with or without YaRN. Raises CheckpointError."""
    config.require("rope_interleave", True)
    theta, yarn = read_rope(config, {"yarn": _read_latent_yarn})
    if theta <= 1 or dims < 2 or dims % 2:
        raise CheckpointError(
            f"rope_theta in {config.place} must be above 1 and qk_rope_head_dim positive and even, got {theta} and "
            f"{dims}. Restore the file."
        )
    return RopeConfig(dims=dims, theta=theta, scaling=yarn)


def _read_yarn(section: ConfigReader, theta: float) -> Yarn:
    factor = section.get("factor", float)
    original = section.get("original_max_position_embeddings", int)
    if factor < 1 or original < 1 or theta <= 1:
        raise CheckpointError(
            f"factor and original_max_position_embeddings in {section.place} must be at least 1, got {factor} and "
            f"{original}, and rope_theta above 1, got {theta}. Restore the file."
        )
    # Either alone has no meaning but to DeepSeek.
    mscales = {name: section.get(name, float, 0.0) for name in ("mscale", "mscale_all_dim")}
    return Yarn(
        theta=theta,
        factor=factor,
        original_positions=original,
        beta_fast=section.positive("beta_fast", 32.0),
        beta_slow=section.positive("beta_slow", 1.0),
        attention_factor=section.optional("attention_factor", float),
        truncate=section.get("truncate", bool, True),
        **(mscales if all(mscales.values()) else {}),
    )


def _read_latent_yarn(section: ConfigReader, theta: float) -> Yarn:
    mscale, mscale_all_dim = section.get("mscale", float, 1.0), section.get("mscale_all_dim", float, 0.0)
    plain = replace(_read_yarn(section, theta), attention_factor=None)
    yarn = replace(plain, mscale=mscale, mscale_all_dim=mscale_all_dim)
    section.require("truncate", True)
    section.require("attention_factor", yarn.amplitude)
    return yarn


LLAMA_SCALINGS: dict[str, ScalingReader] = {
    "linear": lambda section, _: LinearScaling(factor=section.positive("factor")),
    "llama3": _read_llama3,
    "yarn": _read_yarn,
}
"""Scalings of models that rotate whole heads."""
