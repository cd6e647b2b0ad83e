"""EAGLE-3 (Li et al., 2025) and 3.1, in the authors' layout or that of `speculators`: the draft reads the states of
several target layers and can have its own vocabulary."""

from __future__ import annotations

import torch

from attn_backends.kernels.rope import Rope
from spec_decode.model_api import Attention, BlockDraft, DraftInputs, DraftModel, KeepRows, TargetModel
from spec_decode.models.checkpoints.mask_token import require_mask_token
from spec_decode.models.checkpoints.store import ScopedWeights, TensorStore
from spec_decode.models.config import MAX_LAYERS, ModelConfig
from spec_decode.models.decoder_config import DecoderConfig, read_decoder, states_draft_windows
from spec_decode.models.decoder_weights import read_parameters
from spec_decode.models.draft import HiddenStatesDraft, check_aux_states, decoder_fields
from spec_decode.models.draft_vocabulary import DraftVocabulary, read_vocabulary
from spec_decode.models.eagle3_parts import AuxStates, DraftHead, Eagle3Ends, first_prefix, published_name
from spec_decode.models.eagle3_parts import aux_hidden_state_layers as aux_hidden_state_layers
from spec_decode.models.kernels.embed_concat import embed_concat
from spec_decode.models.layers.decoder_layer import DecoderLayer, LayerOptions
from spec_decode.models.layers.linear import ResidualStream
from spec_decode.models.layers.rms_norm import RMSNorm

MASK_HIDDEN = "mask_hidden"
"""The tensor that P-EAGLE (Parallel EAGLE) adds: the input of a mask instead of the target's states."""


class FirstLayer(DecoderLayer):
    """A decoder layer whose attention reads the concatenated embedding and hidden state, each with its own norm."""

    def __init__(self, config: ModelConfig, options: LayerOptions, *, normed_residual: bool) -> None:
        """normed_residual: the residual starts from the normed hidden state instead of the hidden state."""
        super().__init__(config, 0, options, qkv_inputs=2 * config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.normed_residual = normed_residual

    def fuse(
        self,
        both: torch.Tensor,
        hidden: torch.Tensor,
        rope: Rope,
        attention: Attention,
        keep: KeepRows | None,
    ) -> ResidualStream:
        """Run the layer on `both` [T, 2 H], the concatenated normed embedding and states, and on these states, hidden
        [T, H]. Returns the residual and the pending delta, both [T, H], for the rows that `keep` selects."""
        residual = both.chunk(2, -1)[1].contiguous() if self.normed_residual else hidden
        return self.after_qkv(residual, self.qkv(both), rope, attention, keep)


class Eagle3(Eagle3Ends, HiddenStatesDraft, DraftModel):
    """At position p, maps the token at p + 1 and the state at p to a state that predicts the token at p + 2."""

    def __init__(
        self, weights: ScopedWeights, config: DecoderConfig, vocabulary: DraftVocabulary, target: TargetModel
    ) -> None:
        super().__init__(weights, config, vocabulary, target)
        store, model = weights.store, config.model
        self.target_states_size = target.target_states_size
        sizes = self.target_states_size, target.hidden_size
        self.aux = AuxStates(store, sizes, model.hidden_size, model.norm_eps)
        normed_residual = store.config.get("norm_before_residual", bool, False)
        options = LayerOptions.found(store, first_prefix(store))
        self.layers = self.stack(store, FirstLayer(model, options, normed_residual=normed_residual))
        self.head = DraftHead(store, target, model.hidden_size, model.norm_eps, vocabulary.scored)

    def forward(self, inputs: DraftInputs) -> torch.Tensor:
        """Return states [T, H], normed if norm_output is set."""
        first, *others = self.layers
        assert isinstance(first, FirstLayer)
        rope = self.rotary(inputs.positions)
        norms, eps = [first.attn_norm.weight, first.hidden_norm.weight], first.attn_norm.eps
        both = embed_concat(inputs.token_ids, self.embedding, inputs.hidden, norms, eps)
        x, delta = first.fuse(both, inputs.hidden, rope, inputs.attention, None if others else inputs.keep)
        for layer in others:
            x, delta = layer(x, delta, rope, inputs.attention, inputs.keep if layer is others[-1] else None)
        return self.head.next_states(x, delta)


class ParallelEagle3(BlockDraft, Eagle3):
    """An EAGLE-3 draft trained to predict K tokens at once from a mask and its states, such as P-EAGLE."""

    def __init__(
        self,
        weights: ScopedWeights,
        config: DecoderConfig,
        vocabulary: DraftVocabulary,
        target: TargetModel,
        mask: tuple[int, torch.Tensor],
    ) -> None:
        """As Eagle3; mask: the mask's token and states [F]."""
        super().__init__(weights, config, vocabulary, target)
        self.mask_token_id, self.mask_hidden = mask


def serves(store: TensorStore) -> bool:
    """Whether the checkpoint's tensors have EAGLE-3's names."""
    return not store.names().isdisjoint({"d2t", "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"})


def load(store: TensorStore, target: TargetModel, *, dtype: torch.dtype, device: torch.device) -> Eagle3:
    """Load the draft, ready to run. Raises CheckpointError."""
    config = read_decoder(decoder_fields(store), states_draft_windows, max_positions=target.max_positions)
    model = config.model
    read = store.config.get("target_hidden_size", int, model.hidden_size)
    layers = aux_hidden_state_layers(store, target.num_layers or MAX_LAYERS)
    check_aux_states(store, target, read, layers)
    vocabulary = read_vocabulary(store, target, model.vocab_size, device)
    weights = ScopedWeights(store, "", dtype, device)
    arguments = (weights, config, vocabulary, target)
    mask = _read_mask(store, vocabulary.known, target.target_states_size, dtype, device)
    with torch.device("meta"):
        draft = Eagle3(*arguments) if mask is None else ParallelEagle3(*arguments, mask)
    first = first_prefix(store)
    draft = read_parameters(draft, weights, lambda name: published_name(name).replace("layers.0.", first))
    store.refuse_unused()
    return draft


def _read_mask(
    store: TensorStore, vocab_size: int, states_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[int, torch.Tensor] | None:
    """Return the token and the states of a mask, or None if the checkpoint has none."""
    if MASK_HIDDEN not in store.names():
        return None
    token = require_mask_token(store, vocab_size, f"the checkpoint has {MASK_HIDDEN}")
    return token, store.take_flat(MASK_HIDDEN, states_size, dtype).to(device)
