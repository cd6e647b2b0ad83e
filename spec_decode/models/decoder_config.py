"""Read the config.json of published Llama-style decoders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from builders import StateSpec
from spec_decode.model_api import LayerGroup
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.config import ModelConfig
from spec_decode.models.layer_windows import Windows, read_windows
from spec_decode.models.layers.rope import (
    LLAMA_SCALINGS,
    RopeConfig,
    RotaryEmbedding,
    Scaling,
    WindowRotary,
    read_rope,
    read_rotated_dims,
    rope_section,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """The decoder layers that config.json describes."""

    model: ModelConfig
    scaling: Scaling | None
    windows: Windows
    """The sliding window of each layer, None for full attention."""
    causal: tuple[bool, ...] | None = None
    """Whether each layer is causal; None: all are."""
    window_rope: RopeConfig | None = None
    """The rotation in layers with a window, if it differs from that in others."""
    recurrent: LayerGroup[StateSpec] | None = None
    """The layers without attention; the journal and the dtype of their spec do not count. None: all layers attend."""

    def make_rotary(self) -> RotaryEmbedding:
        """Return the angles for the layers. Raises CheckpointError for an unreasonably large table."""
        if self.window_rope is None:
            return RotaryEmbedding(self.model, self.scaling)
        return WindowRotary(self.model, self.scaling, self.window_rope, self.windows)

    def layer_groups(self, page_size: int, dtype: torch.dtype) -> list[LayerGroup]:
        """Return one group of attention for each distinct window and causality, in the order of their first layers."""
        every = zip(self.windows, self.causal or (True,) * len(self.windows), strict=True)
        without = () if self.recurrent is None else self.recurrent.layers
        kinds = {layer: kind for layer, kind in enumerate(every) if layer not in without}
        groups = []
        for window, causal in dict.fromkeys(kinds.values()):
            spec = replace(self.model, sliding_window=window).attention_spec(page_size, dtype)
            layers = tuple(layer for layer, kind in kinds.items() if kind == (window, causal))
            name = ("layers" if window is None else f"window{window}") + ("" if causal else "_blocks")
            groups.append(LayerGroup(name=name, spec=replace(spec, causal=causal), layers=layers))
        return groups


ReadWindows = Callable[[ConfigReader, int], Windows]
"""Returns the window of each layer, for the config and the number of layers."""


def read_decoder(
    config: ConfigReader, windows: ReadWindows, *, max_positions: int | None = None, rotated: float | None = None
) -> DecoderConfig:
    """Read the config of Llama-style layers; max_positions None takes the config's.

    rotated: the rotated fraction of a head, if the file does not say; None: it must be whole heads. Raises
    CheckpointError.
    """
    config.require("hidden_act", "silu")
    config.require("mlp_bias", False)
    if rotated is None:
        _require_whole_heads(config)
    theta, scaling = read_rope(config, LLAMA_SCALINGS)
    hidden, heads = config.get("hidden_size", int), config.get("num_attention_heads", int)
    dim = config.get("head_dim", int, hidden // max(heads, 1))
    try:
        model = ModelConfig(
            vocab_size=config.get("vocab_size", int),
            hidden_size=hidden,
            intermediate_size=config.get("intermediate_size", int),
            num_layers=config.get("num_hidden_layers", int),
            num_q_heads=heads,
            num_kv_heads=config.get("num_key_value_heads", int, heads),
            head_dim=dim,
            max_positions=max_positions or config.get("max_position_embeddings", int, 2048),
            rope_theta=theta,
            norm_eps=config.get("rms_norm_eps", float, 1e-6),
            rotated_dims=None if rotated is None else read_rotated_dims(config, dim, rotated),
        )
        decoder = DecoderConfig(model=model, scaling=scaling, windows=windows(config, model.num_layers))
        # Build the specs once, so an impossible attention is reported as an error of the config.
        if not decoder.layer_groups(1, torch.float32):
            raise ValueError(f"num_hidden_layers must be at least 1, got {model.num_layers}")
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"invalid decoder in {config.place}: {error}. Restore the file.") from error
    return decoder


def states_draft_windows(config: ConfigReader, num_layers: int) -> Windows:
    """Return the window of each layer of a draft that reads the target's states. Raises CheckpointError."""
    return read_windows(config, num_layers, family=config.get("model_type", str, ""), listed=True)


def _require_whole_heads(config: ConfigReader) -> None:
    for section in (rope_section(config), config):
        if (part := section.get("partial_rotary_factor", float, 1.0)) != 1.0:
            raise CheckpointError(
                f"partial_rotary_factor in {section.place} must be 1, got {part}: this model rotates whole heads. "
                "Use a checkpoint without it."
            )
