"""The target: a Llama-style causal language model over flat tokens."""

from __future__ import annotations

import torch
from torch import nn

from spec_decode.model_api import Attention, LayerGroup, TargetModel, TargetStates
from spec_decode.models.config import ModelConfig
from spec_decode.models.kernels.linear import linear
from spec_decode.models.layers.decoder_layer import DecoderLayer
from spec_decode.models.layers.linear import Embedding
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.layers.rope import RotaryEmbedding


class LlamaTarget(TargetModel):
    """Embedding, decoder layers, final norm and an untied output projection.

    Raises ValueError for a config with latents.
    """

    batch_invariant = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.latent is not None:
            raise ValueError(
                f"a target cannot use latent attention, got {config.latent}. Leave latent out of its config."
            )
        self.config = config
        self.num_layers = config.num_layers
        self.vocab_size, self.max_positions = config.vocab_size, config.max_positions
        self.hidden_size = self.target_states_size = config.hidden_size
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = RotaryEmbedding(config)

    @property
    def output_projection(self) -> torch.Tensor:
        """[V, H]."""
        return self.lm_head.weight

    def layer_groups(self, page_size: int) -> list[LayerGroup]:
        """Return one group: all layers are alike."""
        return self.config.layer_groups(page_size, self.embed.weight.dtype)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> TargetStates:
        """Return the normed hidden states for token_ids and positions, int64 [T]; a draft reads the same states."""
        x, delta, rope = self.embed(token_ids), None, self.rotary(positions)
        for layer in self.layers:
            x, delta = layer(x, delta, rope, attention)
        hidden: torch.Tensor = self.norm(x, delta)[1]
        return TargetStates(hidden, hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, vocab_size] for hidden [T, H], in the model's dtype."""
        return linear(hidden, self.lm_head.weight)
