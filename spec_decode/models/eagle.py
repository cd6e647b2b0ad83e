"""EAGLE drafts (Li et al., 2024): one of the shipped pair, and one as its authors publish it.

Legend: T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn

from spec_decode.models.attention import Attention
from spec_decode.models.base import DraftModel, LayerGroup, TargetModel
from spec_decode.models.checkpoints.scoped_weights import ScopedWeights
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.config import ModelConfig
from spec_decode.models.decoder_config import DecoderConfig, read_decoder
from spec_decode.models.decoder_weights import fill, layer_parameters, prefixed
from spec_decode.models.draft import (
    HiddenStatesDraft,
    check_embedding,
    check_shared,
    check_target_hidden_states,
    decoder_fields,
)
from spec_decode.models.kernels.embed_concat import embed_concat
from spec_decode.models.kernels.skinny_linear import embed_linear, is_skinny, linear
from spec_decode.models.layers.decoder_layer import DecoderLayer, ResidualStream
from spec_decode.models.layers.latent_attention import LatentDecoderLayer
from spec_decode.models.layers.layer_options import LayerOptions, PublishedLayer
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.layers.rope import Rotary
from spec_decode.models.llama import LlamaTarget


class EagleDraft(DraftModel):
    """At position p: the token at p + 1 and the hidden state at p give a hidden state that predicts the token at p + 2.

    Embedding and output projection are the target's own modules, shared, not copied.
    """

    def __init__(self, config: ModelConfig, target: LlamaTarget) -> None:
        super().__init__()
        self.config = config
        self.vocab_size, self.max_positions = config.vocab_size, config.max_positions
        self.hidden_size = self.target_states_size = config.hidden_size
        self.fuse = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        layer = DecoderLayer if config.latent is None else LatentDecoderLayer
        self.layer = layer(config, 0)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.rotary = Rotary(config)
        # A tuple hides the target's modules from this module's own parameters.
        self._shared = (target.embed, target.lm_head)

    def layer_groups(self, page_size: int) -> list[LayerGroup]:
        """The one layer."""
        return self.config.layer_groups(page_size, self.fuse.weight.dtype)

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """token_ids, positions int64 [T], hidden [T, H]; normed hidden states [T, H]."""
        table = self._shared[0].weight
        if is_skinny(hidden, self.fuse.weight):
            x = embed_linear(token_ids, table, hidden, self.fuse.weight)
        else:
            x = self.fuse(embed_concat(token_ids, table, hidden))
        x, delta = self.layer(x, None, positions, self.rotary, attention)
        hidden_states: torch.Tensor = self.norm(x, delta)[1]
        return hidden_states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, H]; logits [T, vocab_size]."""
        return linear(hidden, self._shared[1].weight)


class NoNorm(nn.Module):
    """In the place of a norm that a layer lacks."""

    def forward(self, x: torch.Tensor, delta: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if delta is None else x + delta
        return total, total


class UnnormedLayer(PublishedLayer):
    """A decoder layer whose attention reads its input as it is; the first of a stack, to which no delta comes."""

    def __init__(self, config: ModelConfig, layer: int, extras: LayerOptions) -> None:
        super().__init__(config, layer, extras)
        self.add_module("attn_norm", NoNorm())

    def folded_attention(
        self, x: torch.Tensor, delta: torch.Tensor | None, positions: torch.Tensor, rotary: Rotary, attention: Attention
    ) -> ResidualStream:
        return self.folded_attention_over(x, x, positions, rotary, attention)


class PublishedEagle(HiddenStatesDraft):
    """At position p: the token at p + 1 and the hidden state at p give a hidden state that predicts the token at p + 2.

    The output projection is the target's. Positions go as far as the target's: rotary angles need no training, and a
    wrong guess costs a round's time, not its text.
    """

    def __init__(
        self,
        config: DecoderConfig,
        target: TargetModel,
        extras: list[LayerOptions],
        *,
        fc_bias: bool,
        own_embedding: bool,
    ) -> None:
        super().__init__(config, target, own_embedding=own_embedding)
        self.target_states_size = self.hidden_size
        self.fc = nn.Linear(2 * self.hidden_size, self.hidden_size, bias=fc_bias)
        kinds = [UnnormedLayer, *[PublishedLayer] * (len(extras) - 1)]
        self.layers = nn.ModuleList(
            kind(config.model, layer, extra) for layer, (kind, extra) in enumerate(zip(kinds, extras, strict=True))
        )

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """token_ids, positions int64 [T], hidden [T, H]; hidden states [T, H]."""
        x, delta = self._fused(token_ids, hidden), None
        for layer in self.layers:
            x, delta = layer(x, delta, positions, self.rotary, attention)
        return x if delta is None else x + delta

    def _fused(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        if is_skinny(hidden, self.fc.weight) and self.fc.bias is None:
            return embed_linear(token_ids, self.embedding, hidden, self.fc.weight)
        fused: torch.Tensor = self.fc(embed_concat(token_ids, self.embedding, hidden))
        return fused

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, H]; the target's logits [T, vocab_size] of them."""
        return self._target[0].logits(hidden)


def serves(store: TensorStore) -> bool:
    """Whether the checkpoint has EAGLE's names."""
    return "fc.weight" in store.names()


def load(store: TensorStore, target: TargetModel, *, dtype: torch.dtype, device: torch.device) -> PublishedEagle:
    """The draft, ready to run. Raises CheckpointError."""
    config = read_decoder(decoder_fields(store), max_positions=target.max_positions)
    model, names = config.model, store.names()
    check_shared(store, "vocab_size", model.vocab_size, target.vocab_size)
    check_shared(store, "hidden_size", model.hidden_size, target.hidden_size)
    check_target_hidden_states(
        store, model.hidden_size, target, "Make the target with its last hidden states as target_hidden_states."
    )
    fc_bias, own_embedding = "fc.bias" in names, "embed_tokens.weight" in names
    if not own_embedding:
        check_embedding(store, target, dtype)
    weights = ScopedWeights(store, "", dtype, device)
    extras = [LayerOptions.found(store, f"layers.{layer}.") for layer in range(model.num_layers)]

    state = {"fc.weight": weights.take("fc.weight", model.hidden_size, 2 * model.hidden_size)}
    if fc_bias:
        state["fc.bias"] = weights.take("fc.bias", model.hidden_size)
    if own_embedding:
        state["embed.weight"] = weights.take("embed_tokens.weight", model.vocab_size, model.hidden_size)
    for layer, extra in enumerate(extras):
        prefix = f"layers.{layer}."
        state |= prefixed(prefix, layer_parameters(weights.under(prefix), model, extra, normed=layer > 0))
    store.refuse_unused()
    with torch.device("meta"):
        draft = PublishedEagle(config, target, extras, fc_bias=fc_bias, own_embedding=own_embedding)
    return fill(draft, state, device)
