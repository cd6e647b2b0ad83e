"""Causal language models in the layout of `transformers`, as targets and as drafts: Llama and its relatives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, TypeVar

import torch
from torch import nn

from spec_decode.model_api import BlockDraft, DraftInputs, TargetModel
from spec_decode.models.causal_config import family_of, read_causal_config
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.folder_kind import is_mxfp4
from spec_decode.models.checkpoints.mask_token import read_mask_token
from spec_decode.models.checkpoints.mxfp4 import check_modules
from spec_decode.models.checkpoints.store import ScopedWeights, TensorStore
from spec_decode.models.decoder import Decoder, DecoderTarget, check_aux_layers, make_embedding
from spec_decode.models.decoder_config import DecoderConfig
from spec_decode.models.decoder_weights import FUSED, Layout, read_parameters
from spec_decode.models.draft import DecoderDraft
from spec_decode.models.draft_vocabulary import HEAD, DraftVocabulary, read_vocabulary
from spec_decode.models.layer_windows import ARCHITECTURES as _FAMILIES
from spec_decode.models.layer_windows import HYBRIDS, read_recurrent_layers
from spec_decode.models.layers.decoder_layer import LayerOptions, make_layer
from spec_decode.models.layers.linear import Embedding
from spec_decode.models.mixture_layers import FAMILIES, read_mixture_layer
from spec_decode.models.text_section import TextSection

ARCHITECTURES = tuple(name for name, family in _FAMILIES.items() if family not in HYBRIDS)
"""Of drafts. A hybrid has a layer that drafts for it."""
EMBEDDING = "model.embed_tokens.weight"
_EMBEDDING = EMBEDDING.removeprefix("model.")
_LAYOUTS: dict[str, Layout] = {"phi3": FUSED, "gemma3_text": {"mlp_norm": ("pre_feedforward_layernorm",)}}
"""Names of a family's tensors that differ from Llama's."""
_TIED = ("gemma3_text",)
"""Families whose head is the embedding unless config.json says that it is not."""
M = TypeVar("M", bound=Decoder)


class CausalDraft(Decoder, DecoderDraft):
    """At position p, maps the token at p to a state that predicts the token at p + 1. It does not read the target.

    target_states_size is the target's, so the drafter can pass the hidden states of any target.
    """

    batch_invariant = True
    embed: Embedding
    position_offset: ClassVar[int] = 1

    def __init__(
        self, config: DecoderConfig, layers: Iterable[nn.Module], vocabulary: DraftVocabulary, target: TargetModel
    ) -> None:
        model = config.model
        super().__init__(target, config, config.make_rotary(), make_embedding(model, vocabulary.embedded))
        self.hidden_size, self.token_map = model.hidden_size, vocabulary.token_map
        self.add_layers(model, layers, vocabulary.scored)

    def forward(self, inputs: DraftInputs) -> torch.Tensor:
        """Return normed states [T, H]; hidden is not read."""
        x, delta, _ = self.run_layers(inputs.token_ids, inputs.positions, inputs.attention)
        states: torch.Tensor = self.norm(inputs.kept(x), inputs.kept(delta))[1]
        return states


class ParallelCausalDraft(BlockDraft, CausalDraft):
    """A language model trained to predict K tokens at once from a mask token, such as PARD."""

    def __init__(
        self,
        config: DecoderConfig,
        layers: Iterable[nn.Module],
        vocabulary: DraftVocabulary,
        target: TargetModel,
        mask_token_id: int,
    ) -> None:
        super().__init__(config, layers, vocabulary, target)
        self.mask_token_id = mask_token_id


def serves(store: TensorStore) -> bool:
    """Whether config.json names one of the architectures."""
    return len(store.architectures) == 1 and store.architectures[0] in ARCHITECTURES


def keeps_states(store: TensorStore) -> bool:
    """Whether a target that `unserved` has no objection to has recurrent layers. Raises CheckpointError."""
    fields = TextSection.of(store).fields
    return family_of(store) in HYBRIDS and bool(read_recurrent_layers(fields, fields.get("num_hidden_layers", int)))


def load(store: TensorStore, target: TargetModel, *, dtype: torch.dtype, device: torch.device) -> CausalDraft:
    """Load the draft, ready to run. Raises CheckpointError."""
    weights = ScopedWeights(store, "", dtype, device)
    config = read_causal_config(store, dtype)
    vocabulary = read_vocabulary(store, target, config.model.vocab_size, device, embedding=EMBEDDING, has_head=True)
    mask_token_id = read_mask_token(store, vocabulary.known)
    arguments = (config, _layers(config, weights), vocabulary, target)
    with torch.device("meta"):
        draft = CausalDraft(*arguments) if mask_token_id is None else ParallelCausalDraft(*arguments, mask_token_id)
    return _read(draft, weights)


def load_target(
    store: TensorStore,
    states: Callable[[int], Sequence[int] | None] = lambda _: None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantises: bool = False,
) -> DecoderTarget:
    """Load the target that `unserved` has no objection to, ready to run.

    states: returns aux_hidden_state_layers, for the number of layers. quantises: round the weights of products to 8
    bits, one by one, so that the 16-bit model is never whole on the device. Raises CheckpointError, and ValueError for
    layers that the model does not have.
    """
    weights = ScopedWeights(store, "", dtype, device, quantises)
    config = read_causal_config(store, dtype)
    if is_mxfp4(store.config.values):
        check_modules(store)
    aux = states(config.model.num_layers)
    check_aux_layers(aux, config.model.num_layers)
    layers = _layers(config, weights)
    with torch.device("meta"):
        target = DecoderTarget(config.model, config, config.make_rotary(), layers, aux, config.recurrent)
    attending = [layer for group in config.layer_groups(1, dtype) for layer in group.layers]
    target.kv_scales = store.kv_scales(attending)
    return _read(target, weights)


def _layers(config: DecoderConfig, weights: ScopedWeights) -> list[nn.Module]:
    """Return the layers: on the meta device, or with their weights if they are a mixture's or a hybrid's. Raises
    CheckpointError."""
    count, family = config.model.num_layers, family_of(weights.store)
    if family in FAMILIES:
        return [read_mixture_layer(config, weights, layer, family) for layer in range(count)]
    options = _options(weights.store)
    with torch.device("meta"):
        return [make_layer(config.model, layer, options) for layer in range(count)]


def _read(model: M, weights: ScopedWeights) -> M:
    """Read the parameters that are left, and refuse tensors that no part of the model is. Raises CheckpointError."""
    store, family = weights.store, family_of(weights.store)
    fields, prefix = TextSection.of(store)
    tied = fields.get("tie_word_embeddings", bool, family in _TIED)
    head = prefix + _EMBEDDING if tied else HEAD
    layout = _LAYOUTS.get(family, {})
    model = read_parameters(model, weights, lambda name: head if name == HEAD else prefix + name, layout)
    if tied and weights.has(HEAD):
        table = model.embed.weight
        _check_tied(store, weights.take(HEAD, *table.shape), table)
    first = len(model.layers)
    drafts = range(first, first + store.config.get("num_nextn_predict_layers", int, 0))
    # What drafts for a hybrid, and what reads its pictures, has names of its own.
    store.refuse_unused(under=prefix if family in HYBRIDS else "", drafts=drafts)
    return model


def _check_tied(store: TensorStore, head: torch.Tensor, embedding: torch.Tensor) -> None:
    if not torch.equal(head, embedding):
        raise CheckpointError(
            f"lm_head.weight in {store.folder} differs from {_EMBEDDING}, but tie_word_embeddings is "
            "true; either could be the trained head. Set tie_word_embeddings to false, or remove lm_head.weight."
        )


def _options(store: TensorStore) -> LayerOptions:
    family = family_of(store)
    biased = family not in ("mistral", "qwen2", "phi3") and store.config.get("attention_bias", bool, False)
    gemma, olmo = family == "gemma3_text", family in ("olmo2", "olmo3")
    return LayerOptions(
        qkv_bias=biased or family == "qwen2",
        out_bias=biased,
        qk_norm=gemma or olmo or family == "qwen3",
        joint_qk_norm=olmo,
        norms="both" if gemma else "after" if olmo else "before",
        gelu=gemma,
    )
