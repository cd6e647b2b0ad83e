"""A small causal language model as the draft: Llama, Mistral or Qwen in the layout of `transformers`."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import nn

from spec_decode.model_api import BlockDraft, DraftInputs, TargetModel
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.mask_token import read_mask_token
from spec_decode.models.checkpoints.store import ScopedWeights, TensorStore
from spec_decode.models.decoder_config import DecoderConfig, read_decoder
from spec_decode.models.decoder_weights import read_parameters
from spec_decode.models.draft import DecoderDraft
from spec_decode.models.draft_vocabulary import HEAD, DraftVocabulary, read_vocabulary
from spec_decode.models.layer_windows import ARCHITECTURES as ARCHITECTURES
from spec_decode.models.layer_windows import read_windows
from spec_decode.models.layers.decoder_layer import DecoderLayer, LayerOptions
from spec_decode.models.layers.linear import Embedding, Linear
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.layers.rope import RotaryEmbedding


class CausalDraft(DecoderDraft):
    """At position p, maps the token at p to a state that predicts the token at p + 1. It does not read the target.

    target_states_size is the target's, so the drafter can pass the hidden states of any target.
    """

    batch_invariant = True
    embed: Embedding
    position_offset: ClassVar[int] = 1

    def __init__(
        self, config: DecoderConfig, options: LayerOptions, vocabulary: DraftVocabulary, target: TargetModel
    ) -> None:
        model = config.model
        embed = Embedding(vocabulary.embedded, model.hidden_size)
        super().__init__(target, config, RotaryEmbedding(model, config.scaling), embed)
        self.hidden_size, self.token_map = model.hidden_size, vocabulary.token_map
        self.layers = nn.ModuleList(DecoderLayer(model, layer, options) for layer in range(model.num_layers))
        self.norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.lm_head = Linear(model.hidden_size, vocabulary.scored)

    def forward(self, inputs: DraftInputs) -> torch.Tensor:
        """Return normed states [T, H]; hidden is not read."""
        x, delta, rope = self.embed(inputs.token_ids), None, self.rotary(inputs.positions)
        for layer in self.layers:
            x, delta = layer(x, delta, rope, inputs.attention)
        states: torch.Tensor = self.norm(inputs.kept(x), inputs.kept(delta))[1]
        return states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, draft vocabulary] for hidden [T, H]."""
        return self.lm_head.product(hidden)


class ParallelCausalDraft(BlockDraft, CausalDraft):
    """A language model trained to predict K tokens at once from a mask token, such as PARD."""

    def __init__(
        self,
        config: DecoderConfig,
        options: LayerOptions,
        vocabulary: DraftVocabulary,
        target: TargetModel,
        mask_token_id: int,
    ) -> None:
        super().__init__(config, options, vocabulary, target)
        self.mask_token_id = mask_token_id


def serves(store: TensorStore) -> bool:
    """Whether config.json names one of the architectures."""
    return len(store.architectures) == 1 and store.architectures[0] in ARCHITECTURES


def load(store: TensorStore, target: TargetModel, *, dtype: torch.dtype, device: torch.device) -> CausalDraft:
    """Load the draft, ready to run. Raises CheckpointError."""
    windows = partial(read_windows, family=ARCHITECTURES[store.architectures[0]])
    config, options = read_decoder(store.config, windows), _options(store)
    size, embedding = config.model.vocab_size, "model.embed_tokens.weight"
    vocabulary = read_vocabulary(store, target, size, device, embedding=embedding, has_head=True)
    mask_token_id = read_mask_token(store, vocabulary.known)
    arguments = (config, options, vocabulary, target)
    with torch.device("meta"):
        draft = CausalDraft(*arguments) if mask_token_id is None else ParallelCausalDraft(*arguments, mask_token_id)
    tied = store.config.get("tie_word_embeddings", bool, False)
    head = embedding if tied else HEAD
    weights = ScopedWeights(store, "", dtype, device)
    draft = read_parameters(draft, weights, lambda name: head if name == HEAD else f"model.{name}")
    if tied and weights.has(HEAD):
        table = draft.embed.weight
        _check_tied(store, weights.take(HEAD, *table.shape), table)
    store.refuse_unused()
    return draft


def _check_tied(store: TensorStore, head: torch.Tensor, embedding: torch.Tensor) -> None:
    if not torch.equal(head, embedding):
        raise CheckpointError(
            f"lm_head.weight in {store.folder} differs from model.embed_tokens.weight, but tie_word_embeddings is "
            "true; either could be the trained head. Set tie_word_embeddings to false, or remove lm_head.weight."
        )


def _options(store: TensorStore) -> LayerOptions:
    (architecture,) = store.architectures
    if architecture == "Qwen2ForCausalLM":
        return LayerOptions(qkv_bias=True)
    if architecture == "MistralForCausalLM":
        return LayerOptions()
    biased = store.config.get("attention_bias", bool, False)
    return LayerOptions(qkv_bias=biased, out_bias=biased, qk_norm=architecture == "Qwen3ForCausalLM")
