"""Base classes of multi-token prediction: a draft layer trained together with the target, and a chain of such layers.

Legend: T tokens, H hidden size. Floats are in the draft's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, cast

import torch
from torch import nn

from spec_decode.model_api import DraftInputs, LayerGroup, ModuleDraft, TargetModel
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import ScopedWeights
from spec_decode.models.kernels.embed_concat import embed_concat
from spec_decode.models.kernels.fp8_weight import Weight
from spec_decode.models.kernels.linear import linear
from spec_decode.models.layers.feed_forward import FeedForward
from spec_decode.models.layers.grouped_attention import GroupedAttention
from spec_decode.models.layers.mla_attention import MlaAttention
from spec_decode.models.layers.moe import MixtureOfExperts
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.one_layer_draft import OneLayerDraft
from spec_decode.models.target_head import TargetHead


class MtpDraft(OneLayerDraft):
    """A draft whose steps read the states that it returns. It uses its target's head if the checkpoint has none."""

    group_name: ClassVar[str] = "mtp"

    def __init__(
        self,
        weights: ScopedWeights,
        target: TargetModel,
        *,
        embedding: str,
        head: str,
        norms: tuple[str, str] = ("enorm.weight", "hnorm.weight"),
        norm_offset: float = 0.0,
        config: ConfigReader | None = None,
    ) -> None:
        """As OneLayerDraft; head: name of the layer's own [vocab, H] matrix, which may be absent."""
        config = config or weights.store.config
        super().__init__(weights, target, embedding=embedding, norms=norms, norm_offset=norm_offset, config=config)
        self.max_positions = config.get("max_position_embeddings", int)
        self.hidden_size = self.target_states_size
        self.head: Weight | TargetHead = TargetHead(target)
        if weights.has(head):
            self.head = weights.parameter(head, self.vocab_size, config.get("hidden_size", int))

    def projected(self, normed: torch.Tensor) -> torch.Tensor:
        """Return logits [T, vocab_size] for normed states [T, H]."""
        return self.head.product(normed) if isinstance(self.head, TargetHead) else linear(normed, self.head)


class PredictionLayer(MtpDraft):
    """A decoder layer. At position p, maps the token at p + 1 and the state at p to a state that predicts the token at
    p + 2.

    The target's hidden states are those after its final norm; the layer, too, returns states after its final norm.
    """

    layer: int
    """The index of this layer among the draft's layers."""
    fuse: Weight
    """[H, 2 H], applied to the concatenated normed embedding and normed state."""
    attention: MlaAttention | GroupedAttention
    mlp: FeedForward | MixtureOfExperts
    attention_norm: RMSNorm
    mlp_norm: RMSNorm
    final_norm: RMSNorm

    def forward(self, inputs: DraftInputs) -> torch.Tensor:
        """Return states [T, H]."""
        norms = [self.embedding_norm.weight, self.state_norm.weight]
        both = embed_concat(inputs.token_ids, self.embedding, inputs.hidden, norms, self.state_norm.eps)
        x, normed = self.attention_norm(linear(both, self.fuse))
        delta = self.attention(normed, inputs.positions, self.layer, inputs.attention, inputs.keep)
        x, normed = self.mlp_norm(inputs.kept(x), delta)
        state: torch.Tensor = self.final_norm(self.mlp(normed, x))[1]
        return state

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, vocab_size] for hidden [T, H]."""
        return self.projected(hidden)


def check_published_form(config: ConfigReader) -> None:
    """Raise CheckpointError for a checkpoint without draft layers, with another activation, or with an attention
    bias."""
    if config.get("num_nextn_predict_layers", int, 0) < 1:
        raise CheckpointError(
            f"num_nextn_predict_layers in {config.place} must be at least 1, got "
            f"{config.values.get('num_nextn_predict_layers')}; the checkpoint has no draft layer. "
            "Use one that has."
        )
    config.require("hidden_act", "silu")
    config.require("attention_bias", False)


class MtpModules(ModuleDraft):
    """At position p, module k reads the token at p + k and the state of module k - 1 at p (for the first module, the
    target's state), and returns a state that predicts the token at p + k + 1."""

    def __init__(self, modules: Sequence[MtpDraft]) -> None:
        """modules: all of the same shape; module i has layer index i."""
        super().__init__()
        first = modules[0]
        self.chain = nn.ModuleList(modules)
        self.vocab_size, self.max_positions = first.vocab_size, first.max_positions
        self.hidden_size, self.target_states_size = first.hidden_size, first.target_states_size

    @property
    def prediction_modules(self) -> tuple[MtpDraft, ...]:
        """The modules of the chain."""
        return tuple(cast(MtpDraft, module) for module in self.chain)

    @property
    def batch_invariant(self) -> bool:
        """Whether all modules are."""
        return all(module.batch_invariant for module in self.prediction_modules)

    def layer_groups(self, page_size: int) -> list[LayerGroup]:
        """Return one group with one layer for each module."""
        [group] = self.prediction_modules[0].layer_groups(page_size)
        return [replace(group, layers=tuple(range(len(self.chain))))]

    def forward(self, inputs: DraftInputs) -> torch.Tensor:
        """Run the first module: return states [T, H]."""
        return self.prediction_modules[0].forward(inputs)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the first module's logits [T, vocab_size] for hidden [T, H]."""
        return self.prediction_modules[0].logits(hidden)
