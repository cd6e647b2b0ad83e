"""A decoder as a target and as a draft: embedding, layers, final norm and output projection, under the same names in
both.

Legend: T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from builders import StateSpec
from spec_decode.model_api import Attention, LayerGroup, TargetModel, TargetStates
from spec_decode.models.config import ModelConfig
from spec_decode.models.draft import AttentionConfig
from spec_decode.models.layers.linear import Embedding, Linear, ScaledEmbedding, joined
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.layers.rope import Rotary


class Decoder(nn.Module):
    """What a target and a draft share. The class beside it sets embed and rotary, and calls `add_layers`."""

    embed: Embedding
    rotary: Rotary
    logits_divisor: float
    logits_cap: float | None

    def add_layers(self, model: ModelConfig, layers: Iterable[nn.Module], scored: int) -> None:
        """Add the layers, the norm, and the projection to `scored` tokens."""
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(model.hidden_size, model.norm_eps, model.norm_offset)
        self.lm_head = Linear(model.hidden_size, scored)
        self.logits_divisor, self.logits_cap = model.logits_divisor, model.logits_cap

    def run_layers(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention, entering: Collection[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None, dict[int, torch.Tensor]]:
        """Return x [T, H] and the pending delta after the last layer, and the states [T, H] that enter these layers.

        token_ids, positions: int64 [T].
        """
        x, delta, ropes = self.embed(token_ids), None, self.rotary.of_layers(positions, len(self.layers))
        entered = {}
        for index, layer in enumerate(self.layers):
            if index in entering:
                entered[index] = joined(x, delta)
            x, delta = layer(x, delta, ropes[index], attention)
        return x, delta, entered

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, V] for hidden [T, H], in fp32 if they are capped; V is a draft's own vocabulary."""
        logits, cap = self.lm_head.product(hidden), self.logits_cap
        if self.logits_divisor != 1:
            logits = logits / self.logits_divisor
        # In place: they are as many as the vocabulary has tokens.
        return logits if cap is None else logits.float().div_(cap).tanh_().mul_(cap)


class DecoderTarget(Decoder, TargetModel):
    """A target of this library's layers."""

    def __init__(
        self,
        model: ModelConfig,
        config: AttentionConfig,
        rotary: Rotary,
        layers: Iterable[nn.Module],
        aux_hidden_state_layers: Sequence[int] | None = None,
        recurrent: LayerGroup[StateSpec] | None = None,
    ) -> None:
        """model: the sizes. config: the attention of the layers. aux_hidden_state_layers: as in TransformersTarget.
        recurrent: the layers with states; the journal and the dtype of their spec do not count.

        Raises ValueError for aux_hidden_state_layers that the model does not have.
        """
        super().__init__()
        self.config, self.num_layers = config, model.num_layers
        self.vocab_size, self.max_positions, self.hidden_size = model.vocab_size, model.max_positions, model.hidden_size
        aux = None if aux_hidden_state_layers is None else tuple(aux_hidden_state_layers)
        check_aux_layers(aux, model.num_layers)
        self.aux_hidden_state_layers = aux
        self.target_states_size = model.hidden_size * (1 if aux is None else len(aux))
        self.embed = make_embedding(model, model.vocab_size)
        self.add_layers(model, layers, model.vocab_size)
        self.rotary, self.state_scale, self._recurrent = rotary, model.state_scale, recurrent

    @property
    def batch_invariant(self) -> bool:
        """Whether no layer has states: their blocks of tokens depend on the batch."""
        return self._recurrent is None

    @property
    def output_projection(self) -> torch.Tensor | None:
        """[V, H], in the dtype of the embedding: of an 8-bit weight, a widened copy. None if the logits are scaled
        or capped."""
        if self.logits_divisor != 1 or self.logits_cap is not None:
            return None
        weight = self.lm_head.weight
        return weight if isinstance(weight, torch.Tensor) else weight.widened(self.embed.weight.dtype)

    def layer_groups(self, page_size: int) -> list[LayerGroup]:
        """Return the layers in groups of the same attention spec."""
        return self.config.layer_groups(page_size, self.embed.weight.dtype)

    def state_groups(self, journal: int) -> list[LayerGroup[StateSpec]]:
        """Return the recurrent layers in one group, if there are any."""
        if (group := self._recurrent) is None:
            return []
        return [replace(group, spec=replace(group.spec, journal=journal, dtype=self.embed.weight.dtype))]

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> TargetStates:
        """Return the normed states for token_ids and positions, int64 [T], and the auxiliary ones, else the same."""
        aux = self.aux_hidden_state_layers
        x, delta, entered = self.run_layers(token_ids, positions, attention, aux or ())
        last, hidden = self.norm(x, delta)
        if aux is None:
            return TargetStates(hidden, hidden)
        entered[len(self.layers)] = last
        states = torch.cat([entered[layer] for layer in aux], -1)
        return TargetStates(hidden, states if self.state_scale == 1 else states * self.state_scale)


def make_embedding(model: ModelConfig, rows: int) -> Embedding:
    """Return an embedding of so many tokens, scaled as the config says."""
    scale, hidden = model.embedding_scale, model.hidden_size
    return Embedding(rows, hidden) if scale == 1 else ScaledEmbedding(rows, hidden, scale)


def check_aux_layers(layers: Sequence[int] | None, num_layers: int) -> None:
    """Raise ValueError for an empty list, and for layers outside 0 to num_layers."""
    if layers is not None and (not layers or not all(0 <= layer <= num_layers for layer in layers)):
        raise ValueError(
            f"aux_hidden_state_layers must be one or more of 0 to {num_layers}, got {tuple(layers)}. Use the layers "
            "that the draft was trained with."
        )
