"""The shipped pair's target: a Llama with an untied output projection."""

from __future__ import annotations

from collections.abc import Sequence

from spec_decode.models.config import ModelConfig
from spec_decode.models.decoder import DecoderTarget
from spec_decode.models.layers.decoder_layer import DecoderLayer
from spec_decode.models.layers.rope import RotaryEmbedding


class LlamaTarget(DecoderTarget):
    """A Llama of one ModelConfig, with random weights.

    Raises ValueError for a config with latents, and for aux_hidden_state_layers that the model does not have.
    """

    config: ModelConfig

    def __init__(self, config: ModelConfig, aux_hidden_state_layers: Sequence[int] | None = None) -> None:
        if config.latent is not None:
            raise ValueError(
                f"a target cannot use latent attention, got {config.latent}. Leave latent out of its config."
            )
        # Lazily: a seed gives the embedding its numbers first.
        layers = (DecoderLayer(config, layer) for layer in range(config.num_layers))
        super().__init__(config, config, RotaryEmbedding(config), layers, aux_hidden_state_layers)
