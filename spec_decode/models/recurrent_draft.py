"""The draft that every step-by-step kind of checkpoint is loaded into.

Legend: T tokens, F target_states_size, H hidden size. Floats are in the weights' dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from spec_decode.model_api import BlockDraft, DraftInputs, LayerGroup, TargetModel
from spec_decode.models.draft import AttentionConfig, DecoderDraft
from spec_decode.models.layers.aux_states import AuxStates
from spec_decode.models.layers.grouped_attention import GroupedShape
from spec_decode.models.layers.linear import Embedding, NormLinear, ResidualStream, joined
from spec_decode.models.layers.mla_attention import MlaShape
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.layers.rope import Rotary
from spec_decode.models.layers.window_attention import WindowShape
from spec_decode.models.target_head import TargetHead


class Fuse(Protocol):
    """Makes the first layer's inputs; see `layers.fuse`."""

    def stream(self, token_ids: torch.Tensor, embedding: torch.Tensor, hidden: torch.Tensor) -> ResidualStream:
        """Return x [T, H], and None, or what the first layer's attention reads instead of a norm of x."""
        ...


class Head(Protocol):
    """Maps states to logits."""

    def product(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, draft vocabulary] for hidden [T, H]."""
        ...


class NormedHead(nn.Module):
    """A norm before the projection to the vocabulary, of states that the next step reads without it."""

    def __init__(self, norm: RMSNorm, linear: NormLinear | TargetHead) -> None:
        super().__init__()
        self.norm, self.linear = norm, linear

    def product(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, draft vocabulary] for hidden [T, H]."""
        if isinstance(self.linear, TargetHead):
            return self.linear.product(self.norm(hidden)[1])
        logits: torch.Tensor = self.linear(hidden, None, self.norm)[1]
        return logits


class RecurrentDraft(DecoderDraft):
    """At position p, maps the token at p + 1 and the state at p to a state that predicts the token at p + 2: fuses the
    token's embedding with the state, runs the layers, and norms their output. The next step reads the new state.

    The published kinds differ in their parts:

    fuse    a projection (EAGLE), a projection of the normed pair (multi-token prediction), or the pair (EAGLE-3)
    layers  called with x, the pending delta, the rotation, the attention and, for the last, `keep`
    norm    None: the next step reads states before the norm, which is part of the head, if there is one (EAGLE-3)
    head    the target's, or one of its own
    """

    fuse: Fuse
    head: Head

    def __init__(
        self,
        target: TargetModel,
        config: AttentionConfig,
        rotary: Rotary,
        embed: Embedding | None,
        *,
        fuse: Fuse,
        layers: Sequence[nn.Module],
        norm: RMSNorm | None,
        head: Head,
    ) -> None:
        super().__init__(target, config, rotary, embed)
        self.hidden_size = self.target_states_size
        self.fuse, self.layers, self.norm, self.head = fuse, nn.ModuleList(layers), norm, head
        self.aux: AuxStates | None = None
        """Fuses the target's states if the draft reads those of several layers."""

    def combine(self, target_hidden_states: torch.Tensor) -> torch.Tensor:
        """Map target_hidden_states [T, F] to the states [T, H] that step 0 starts from."""
        if self.aux is None:
            return target_hidden_states
        states: torch.Tensor = self.aux(target_hidden_states)
        return states

    def forward(self, inputs: DraftInputs) -> torch.Tensor:
        """Return states [T, H] of the tokens that `keep` selects."""
        x, delta = self.fuse.stream(inputs.token_ids, self.embedding, inputs.hidden)
        rope = self.rotary(inputs.positions)
        *others, last = self.layers
        for layer in others:
            x, delta = layer(x, delta, rope, inputs.attention)
        x, delta = last(x, delta, rope, inputs.attention, inputs.keep)
        if self.norm is None:
            return joined(x, delta)
        states: torch.Tensor = self.norm(x, delta)[1]
        return states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, draft vocabulary] for hidden [T, H]."""
        return self.head.product(hidden)


class ParallelDraft(BlockDraft, RecurrentDraft):
    """A RecurrentDraft trained to predict K tokens at once from a mask and its states, such as P-EAGLE."""


@dataclass(frozen=True, slots=True)
class OneLayer:
    """The attention of a draft of one layer. layer: its index among those of a chain of such drafts."""

    name: str
    shape: MlaShape | GroupedShape | WindowShape
    layer: int = 0

    def layer_groups(self, page_size: int, dtype: torch.dtype) -> list[LayerGroup]:
        """Return the layer in one group."""
        return [LayerGroup(name=self.name, spec=self.shape.spec(page_size, dtype), layers=(self.layer,))]
