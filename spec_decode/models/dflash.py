"""DFlash as published: a block of masks with bidirectional attention over context made from the target's states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from attn_backends.kernels.linear.linear import linear
from spec_decode.model_api import ContextAttention, ContextBlockDraft, DraftInputs, TargetModel
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.mask_token import require_mask_token
from spec_decode.models.checkpoints.store import ScopedWeights, TensorStore
from spec_decode.models.config import MAX_LAYERS
from spec_decode.models.decoder_config import DecoderConfig
from spec_decode.models.decoder_weights import read_parameters
from spec_decode.models.dflash_config import aux_hidden_state_layers as aux_hidden_state_layers
from spec_decode.models.dflash_config import read_block_layers, read_block_size, refuse_factors, samples_from_anchor
from spec_decode.models.draft import DecoderDraft, check_aux_states, check_shared, read_embedding
from spec_decode.models.draft_vocabulary import DraftVocabulary, read_vocabulary
from spec_decode.models.layers.decoder_layer import AttentionLayer, DecoderLayer, LayerOptions
from spec_decode.models.layers.linear import Linear
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.layers.rope import RotaryEmbedding
from spec_decode.models.target_head import TargetHead

D = TypeVar("D", bound="DFlash")


class DFlash(DecoderDraft, ContextBlockDraft):
    """Runs the next token and K masks through all layers at once; a mask predicts the token at its own position.

    The context of a layer is keys and values that it projects from the target's states, after `fc` and `hidden_norm`,
    which all layers share.
    """

    windows_are_causal: ClassVar[bool] = True
    """Whether layers with a sliding window are causal if config.json does not say; other layers never are."""

    config: DecoderConfig
    config_json: Mapping[str, Any]
    """The content of config.json as read; a draft that is trained further is saved with it."""

    def __init__(
        self, weights: ScopedWeights, config: DecoderConfig, vocabulary: DraftVocabulary, target: TargetModel
    ) -> None:
        """Create it on the meta device, then load its other parameters with `read_parameters`.

        Raises CheckpointError if it needs the target's embedding and that has another size or dtype.
        """
        store, model = weights.store, config.model
        embed = read_embedding(weights, target, "embed_tokens.weight", vocabulary.embedded, model.hidden_size)
        super().__init__(target, config, RotaryEmbedding(model, config.scaling), embed)
        self.hidden_size, self.token_map = model.hidden_size, vocabulary.token_map
        self.config_json = store.config.values
        self.first_place = 0 if samples_from_anchor(store) else 1
        self.fc = Linear(self.target_states_size, model.hidden_size)
        self.hidden_norm = RMSNorm(model.hidden_size, model.norm_eps)
        options = LayerOptions.found(store, "layers.0.")
        self.layers = nn.ModuleList(self.make_layer(store, layer, options) for layer in range(model.num_layers))
        self.norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.lm_head: Linear | TargetHead = TargetHead(target)
        if weights.has("lm_head.weight"):
            self.lm_head = Linear(model.hidden_size, vocabulary.scored)

    def make_layer(self, store: TensorStore, layer: int, options: LayerOptions) -> AttentionLayer:
        """Create a layer without parameters."""
        return DecoderLayer(self.config.model, layer, options)

    def combine(self, target_hidden_states: torch.Tensor) -> torch.Tensor:
        """Map target_hidden_states [T, F] to normed states [T, H], from which every layer's context is made."""
        normed: torch.Tensor = self.hidden_norm(self.fc.product(target_hidden_states))[1]
        return normed

    def write_context(self, states: torch.Tensor, positions: torch.Tensor, attention: ContextAttention) -> None:
        """Store each layer's keys and values of states [T, H], the output of `combine`, at positions int64 [T]."""
        rope = self.rotary(positions)
        for layer in self.layers:
            assert isinstance(layer, AttentionLayer)
            heads, kv_heads, _ = layer.heads
            rows = slice(heads * layer.head_dim, None)
            bias = None if layer.qkv.bias is None else layer.qkv.bias[rows]
            both = linear(states, layer.qkv.weight[rows], bias).view(len(states), 2 * kv_heads, layer.head_dim)
            key, value = both.split(kv_heads, 1)
            if layer.k_norm is not None:
                key = layer.k_norm(key)[1]
            attention.store(layer.layer, key.contiguous(), value, rope)

    def forward(self, inputs: DraftInputs) -> torch.Tensor:
        """Return normed states [T, H] of blocks of the next token and its masks; hidden is not read."""
        x, delta, rope = F.embedding(inputs.token_ids.flatten(), self.embedding), None, self.rotary(inputs.positions)
        for layer in self.layers:
            x, delta = layer(x, delta, rope, inputs.attention)
        states: torch.Tensor = self.norm(x, delta)[1]
        return states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, draft vocabulary] for hidden [T, H]."""
        return self.lm_head.product(hidden)


def serves(store: TensorStore) -> bool:
    """Whether the checkpoint's tensors have DFlash's names."""
    return {"fc.weight", "hidden_norm.weight", "layers.0.input_layernorm.weight"} <= store.names()


def load(store: TensorStore, target: TargetModel, *, dtype: torch.dtype, device: torch.device) -> DFlash:
    """Load the draft, ready to run. Raises CheckpointError."""
    return load_as(DFlash, store, target, dtype=dtype, device=device)


def load_as(kind: type[D], store: TensorStore, target: TargetModel, *, dtype: torch.dtype, device: torch.device) -> D:
    """Load a draft of this class, ready to run. Raises CheckpointError."""
    if (store.folder / "mask_embedding.pt").exists():
        raise CheckpointError(
            f"{store.folder} has mask_embedding.pt, which is not supported: masks would get another embedding. "
            "Write it into the embedding table."
        )
    refuse_factors(store)
    config = read_block_layers(store, target, windows_are_causal=kind.windows_are_causal)
    model = config.model
    read = store.config.get("target_hidden_size", int, target.hidden_size)
    check_shared(store.folder, "target_hidden_size", read, target.hidden_size)
    # If the target's number of layers is unknown, only the number of its states is checked.
    layers = aux_hidden_state_layers(store, target.num_layers or MAX_LAYERS)
    check_aux_states(store, target, read, layers)
    vocabulary = read_vocabulary(store, target, model.vocab_size, device)
    weights = ScopedWeights(store, "", dtype, device)
    if not weights.has("lm_head.weight"):
        check_shared(f"{store.folder}, without a head,", "hidden_size", model.hidden_size, target.hidden_size)
    with torch.device("meta"):
        draft = kind(weights, config, vocabulary, target)
    draft = read_parameters(draft, weights)
    draft.mask_token_id = require_mask_token(store, vocabulary.known, "a DFlash draft predicts masks")
    draft.block_size = read_block_size(store, draft.first_place)
    store.refuse_unused()
    return draft
