"""Read the config.json of published Llama-style decoders."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from spec_decode.models.base import LayerGroup
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.config import ModelConfig
from spec_decode.models.layers.rope import LLAMA_SCALINGS, Scaling, read_rope, rope_section

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """The decoder layers that config.json describes."""

    model: ModelConfig
    scaling: Scaling | None
    windows: tuple[int | None, ...]
    """The sliding window of each layer, None for full attention."""
    causal: tuple[bool, ...] | None = None
    """Whether each layer is causal; None: all are."""

    def layer_groups(self, page_size: int, dtype: torch.dtype) -> list[LayerGroup]:
        """Return one group for each distinct window and causality, in the order of their first layers."""
        kinds = list(zip(self.windows, self.causal or (True,) * len(self.windows), strict=True))
        groups = []
        for window, causal in dict.fromkeys(kinds):
            spec = replace(self.model, sliding_window=window).attention_spec(page_size, dtype)
            layers = tuple(layer for layer, kind in enumerate(kinds) if kind == (window, causal))
            name = ("layers" if window is None else f"window{window}") + ("" if causal else "_blocks")
            groups.append(LayerGroup(name=name, spec=replace(spec, causal=causal), layers=layers))
        return groups


def read_decoder(config: ConfigReader, *, max_positions: int | None = None) -> DecoderConfig:
    """Read the config of Llama-style layers; max_positions None takes the config's. Raises CheckpointError."""
    config.require("hidden_act", "silu")
    config.require("mlp_bias", False)
    _require_whole_heads(config)
    theta, scaling = read_rope(config, LLAMA_SCALINGS)
    hidden, heads = config.get("hidden_size", int), config.get("num_attention_heads", int)
    try:
        model = ModelConfig(
            vocab_size=config.get("vocab_size", int),
            hidden_size=hidden,
            intermediate_size=config.get("intermediate_size", int),
            num_layers=config.get("num_hidden_layers", int),
            num_q_heads=heads,
            num_kv_heads=config.get("num_key_value_heads", int, heads),
            head_dim=config.get("head_dim", int, hidden // max(heads, 1)),
            max_positions=max_positions or config.get("max_position_embeddings", int, 2048),
            rope_theta=theta,
            norm_eps=config.get("rms_norm_eps", float, 1e-6),
        )
        decoder = DecoderConfig(model=model, scaling=scaling, windows=_windows(config, model.num_layers))
        # Build the specs once, so an impossible attention is reported as an error of the config.
        if not decoder.layer_groups(1, torch.float32):
            raise ValueError(f"num_hidden_layers must be at least 1, got {model.num_layers}")
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"invalid decoder in {config.place}: {error}. Restore the file.") from error
    return decoder


def _require_whole_heads(config: ConfigReader) -> None:
    for section in (rope_section(config), config):
        if (part := section.get("partial_rotary_factor", float, 1.0)) != 1.0:
            raise CheckpointError(
                f"partial_rotary_factor in {section.place} must be 1, got {part}: this model rotates whole heads. "
                "Use a checkpoint without it."
            )


def _windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    window = config.optional("sliding_window", int)
    if not config.get("use_sliding_window", bool, window is not None):
        return (None,) * num_layers
    if window is None:
        config.get("sliding_window", int)
    if kinds := read_layer_kinds(config, num_layers):
        return tuple(window if kind == SLIDING else None for kind in kinds)
    # Qwen's configs name the first layer with a window.
    first = config.get("max_window_layers", int, 0)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def read_layer_kinds(config: ConfigReader, num_layers: int) -> list[str]:
    """Return SLIDING or FULL for each layer, or an empty list if config.json does not say. Raises CheckpointError."""
    kinds = config.get("layer_types", list, [])
    if kinds and (len(kinds) != num_layers or not all(kind in (SLIDING, FULL) for kind in kinds)):
        raise CheckpointError(
            f"layer_types in {config.place} must name {SLIDING} or {FULL} for each of {num_layers} layers, got "
            f"{kinds}. Restore the file."
        )
    return kinds
