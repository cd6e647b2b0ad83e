"""EAGLE drafts (Li et al., 2024): the shipped pair's, and those in the layout that the authors publish.

Legend: T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch

from attn_backends.kernels.rope import Rope
from spec_decode.model_api import Attention, DraftInputs, DraftModel, KeepRows, LayerGroup, TargetModel
from spec_decode.models.checkpoints.store import ScopedWeights, TensorStore
from spec_decode.models.config import ModelConfig
from spec_decode.models.decoder_config import DecoderConfig, read_decoder, states_draft_windows
from spec_decode.models.decoder_weights import read_parameters
from spec_decode.models.draft import HiddenStatesDraft, check_target, decoder_fields
from spec_decode.models.draft_vocabulary import DraftVocabulary, read_vocabulary
from spec_decode.models.layers.decoder_layer import DecoderLayer, LatentDecoderLayer, LayerOptions
from spec_decode.models.layers.linear import EmbedLinear, ResidualStream, joined
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.layers.rope import RotaryEmbedding
from spec_decode.models.llama import LlamaTarget
from spec_decode.models.target_head import TargetHead


class EagleDraft(DraftModel):
    """At position p, maps the token at p + 1 and the hidden state at p to a state that predicts the token at p + 2.

    Shares the target's embedding and output projection modules, without copies; see TargetHead.
    """

    batch_invariant = True

    def __init__(self, config: ModelConfig, target: LlamaTarget) -> None:
        super().__init__()
        self.config = config
        self.vocab_size, self.max_positions = config.vocab_size, config.max_positions
        self.hidden_size = self.target_states_size = config.hidden_size
        self.fuse = EmbedLinear(2 * config.hidden_size, config.hidden_size)
        layer = DecoderLayer if config.latent is None else LatentDecoderLayer
        self.layer = layer(config, 0)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.rotary = RotaryEmbedding(config)
        # A tuple hides the target's modules from this module's own parameters.
        self._shared = (target.embed, target.lm_head)
        self.head = TargetHead(target)

    def layer_groups(self, page_size: int) -> list[LayerGroup]:
        """Return the one layer in one group."""
        return self.config.layer_groups(page_size, self.norm.weight.dtype)

    def forward(self, inputs: DraftInputs) -> torch.Tensor:
        """Return normed hidden states [T, H]."""
        x = self.fuse(inputs.token_ids, self._shared[0].weight, inputs.hidden)
        x, delta = self.layer(x, None, self.rotary(inputs.positions), inputs.attention, inputs.keep)
        hidden_states: torch.Tensor = self.norm(x, delta)[1]
        return hidden_states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, vocab_size] for hidden [T, H]."""
        return self.head.product(hidden)


class UnnormedLayer(DecoderLayer):
    """A decoder layer without a norm before its attention: the first of a stack, whose delta is None."""

    def __init__(self, config: ModelConfig, options: LayerOptions) -> None:
        super().__init__(config, 0, options, qkv_inputs=config.hidden_size)
        del self.attn_norm

    def forward(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        rope: Rope,
        attention: Attention,
        keep: KeepRows | None = None,
    ) -> ResidualStream:
        """Return x [T, H] and the pending delta, for the rows that `keep` selects."""
        return self.after_qkv(x, self.qkv(x), rope, attention, keep)


class PublishedEagle(HiddenStatesDraft, DraftModel):
    """At position p, maps the token at p + 1 and the hidden state at p to a state that predicts the token at p + 2.

    Uses the target's output projection.
    """

    def __init__(
        self, weights: ScopedWeights, config: DecoderConfig, vocabulary: DraftVocabulary, target: TargetModel
    ) -> None:
        super().__init__(weights, config, vocabulary, target)
        store = weights.store
        self.target_states_size = self.hidden_size
        self.fc = EmbedLinear(2 * self.hidden_size, self.hidden_size, bias="fc.bias" in store.names())
        self.layers = self.stack(store, UnnormedLayer(config.model, LayerOptions.found(store, "layers.0.")))
        self.head = TargetHead(target)

    def forward(self, inputs: DraftInputs) -> torch.Tensor:
        """Return hidden states [T, H]."""
        x, delta, rope = self.fc(inputs.token_ids, self.embedding, inputs.hidden), None, self.rotary(inputs.positions)
        *others, last = self.layers
        for layer in others:
            x, delta = layer(x, delta, rope, inputs.attention)
        x, delta = last(x, delta, rope, inputs.attention, inputs.keep)
        return joined(x, delta)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the target's logits [T, vocab_size] for hidden [T, H]."""
        return self.head.product(hidden)


def serves(store: TensorStore) -> bool:
    """Whether the checkpoint's tensors have EAGLE's names."""
    return "fc.weight" in store.names()


def load(store: TensorStore, target: TargetModel, *, dtype: torch.dtype, device: torch.device) -> PublishedEagle:
    """Load the draft, ready to run. Raises CheckpointError."""
    config = read_decoder(decoder_fields(store), states_draft_windows, max_positions=target.max_positions)
    check_target(store, target, config.model.hidden_size)
    vocabulary = read_vocabulary(store, target, config.model.vocab_size, device, has_head=False)
    weights = ScopedWeights(store, "", dtype, device)
    with torch.device("meta"):
        draft = PublishedEagle(weights, config, vocabulary, target)
    draft = read_parameters(draft, weights)
    store.refuse_unused()
    return draft
