"""DFlash2 as published: DFlash with convolutions around every sublayer and a selector that samples tokens in order.

Legend: T tokens, H hidden size, C taps, G groups of channels. Floats are in the weights' dtype.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from attn_backends.kernels.linear.linear import gated_linear
from attn_backends.kernels.rope import Rope
from spec_decode.model_api import Attention, CandidateTable, DraftInputs, TargetModel
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import ScopedWeights, TensorStore
from spec_decode.models.config import ModelConfig
from spec_decode.models.decoder_config import DecoderConfig
from spec_decode.models.dflash import DFlash, load_as
from spec_decode.models.dflash import aux_hidden_state_layers as aux_hidden_state_layers
from spec_decode.models.draft import is_by_speculators
from spec_decode.models.draft_vocabulary import DraftVocabulary
from spec_decode.models.kernels.block_convolution import block_convolution
from spec_decode.models.layers.decoder_layer import AttentionLayer, LayerOptions
from spec_decode.models.layers.linear import Linear, ResidualStream


class ConvolutionPair(nn.Module):
    """The convolutions before and after a sublayer. The sublayer's input modifies the taps of both."""

    def __init__(self, hidden_size: int, num_taps: int, group_size: int) -> None:
        """group_size: channels that share one change of their taps; it divides hidden_size."""
        super().__init__()
        self.num_groups = hidden_size // group_size
        self.base_kernel = nn.Parameter(torch.empty(2, num_taps, hidden_size))
        self.kernel_projection = Linear(hidden_size, 2 * num_taps * self.num_groups)

    def before(self, inputs: torch.Tensor, block_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolve inputs [T, H], blocks of block_len tokens. Returns the sublayer's input [T, H] and the change of
        taps [T, C, G] for `after`."""
        changes = self.kernel_projection(inputs).view(len(inputs), 2, -1, self.num_groups)
        return block_convolution(inputs, self.base_kernel[0], changes[:, 0], block_len), changes[:, 1]

    def after(self, outputs: torch.Tensor, change: torch.Tensor, block_len: int) -> torch.Tensor:
        """Convolve the sublayer's outputs [T, H] with the change that `before` returned; [T, H]."""
        return block_convolution(outputs, self.base_kernel[1], change, block_len)


class ConvolvedLayer(AttentionLayer):
    """Attention and SwiGLU feed-forward, each with a pre-norm, a pair of convolutions and a residual."""

    def __init__(
        self, config: ModelConfig, layer: int, options: LayerOptions, *, num_taps: int, group_size: int
    ) -> None:
        """num_taps, group_size: for all convolutions."""
        super().__init__(config, layer, options, qkv_inputs=config.hidden_size)
        self.attention_conv = ConvolutionPair(config.hidden_size, num_taps, group_size)
        self.mlp_conv = ConvolutionPair(config.hidden_size, num_taps, group_size)

    def forward(
        self, x: torch.Tensor, delta: torch.Tensor | None, rope: Rope, attention: Attention, block_len: int
    ) -> ResidualStream:
        """Run the layer on x and the pending delta, both [T, H], in blocks of block_len tokens. Returns the same
        pair."""
        x, normed = self.attn_norm(x, delta)
        inputs, change = self.attention_conv.before(normed, block_len)
        attended = self.attend(self.qkv.product(inputs), rope, attention)
        delta = self.attention_conv.after(self.out.product(attended), change, block_len)
        x, normed = self.mlp_norm(x, delta)
        inputs, change = self.mlp_conv.before(normed, block_len)
        inner = gated_linear(inputs, self.gate_up.weight)
        return x, self.mlp_conv.after(self.down.product(inner), change, block_len)


ARCHITECTURES = ("DFlash2DraftModel",)
_MAX_CANDIDATES, _MAX_SIZE = 64, 4096
"""Limits above any real draft: candidates of a position, which a kernel keeps in registers, and other sizes."""


class CandidateSelector(nn.Module):
    """The bias that a token adds to the logits of its successors: low-rank, and gated by the state of their
    position."""

    def __init__(self, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = Linear(hidden_size, rank)


class DFlash2(DFlash):
    """DFlash's block, in which every sublayer mixes each position with those just before it. Tokens are sampled in
    order from the top candidates of each position."""

    windows_are_causal: ClassVar[bool] = False

    def __init__(
        self, weights: ScopedWeights, config: DecoderConfig, vocabulary: DraftVocabulary, target: TargetModel
    ) -> None:
        """As DFlash; raises CheckpointError for a reduced vocabulary and for impossible sizes."""
        store, model = weights.store, config.model
        vocab = target.vocab_size
        if vocabulary.scored != vocab or vocabulary.token_map is not None:
            raise CheckpointError(
                f"draft_vocab_size in {store.config.place} must be the target's {vocab}, got {vocabulary.scored}"
                f"{' and a d2t' if 'd2t' in store.names() else ''}: DFlash2's codebooks hold the target's tokens. "
                "Restore the file."
            )
        super().__init__(weights, config, vocabulary, target)
        self.num_candidates = _size(store, "selector_top_k", min(_MAX_CANDIDATES, vocab))
        rank = _size(store, "selector_rank", _MAX_SIZE)
        self.candidate_selector = CandidateSelector(vocab, model.hidden_size, rank)

    def make_layer(self, store: TensorStore, layer: int, options: LayerOptions) -> ConvolvedLayer:
        """Create a layer without parameters. Raises CheckpointError for a convolution longer than the block."""
        hidden = self.config.model.hidden_size
        taps = _size(store, "conv_kernel_size", _size(store, "block_size", _MAX_SIZE))
        group = _size(store, "conv_group_size", hidden)
        if hidden % group:
            raise CheckpointError(
                f"conv_group_size in {store.config.place} must divide hidden_size {hidden}, got {group}. "
                "Restore the file."
            )
        return ConvolvedLayer(self.config.model, layer, options, num_taps=taps, group_size=group)

    def forward(self, inputs: DraftInputs) -> torch.Tensor:
        """Return normed states [T, H], as DFlash does."""
        x, delta = nn.functional.embedding(inputs.token_ids.flatten(), self.embedding), None
        rope = self.rotary(inputs.positions)
        for layer in self.layers:
            x, delta = layer(x, delta, rope, inputs.attention, inputs.token_ids.shape[1])
        states: torch.Tensor = self.norm(x, delta)[1]
        return states

    @property
    def place_logits(self) -> CandidateTable:
        """The selector's tables, and its gates from the states."""
        selector = self.candidate_selector
        return CandidateTable(
            num_candidates=self.num_candidates,
            predecessors=selector.predecessor_codebook,
            successors=selector.successor_codebook,
            gates=selector.hidden_projection.product,
        )


def serves(store: TensorStore) -> bool:
    """Whether config.json says DFlash2, or the tensors have its names."""
    named = store.config.values.get("speculators_model_type") == "dflash2" or set(ARCHITECTURES) & {
        *store.architectures
    }
    return bool(named) or any(name.startswith("candidate_selector.") for name in store.names())


def load(store: TensorStore, target: TargetModel, *, dtype: torch.dtype, device: torch.device) -> DFlash2:
    """Load the draft, ready to run. Raises CheckpointError."""
    return load_as(DFlash2, store, target, dtype=dtype, device=device)


def _size(store: TensorStore, name: str, maximum: int) -> int:
    """Read a size, 1 to `maximum`: from dflash_config as published, or from the top level, where speculators writes it.
    Raises CheckpointError."""
    section = store.config.section("dflash_config")
    if store.config.values.get(name) is not None or (is_by_speculators(store) and section.values.get(name) is None):
        section = store.config
    size = section.get(name, int)
    if not 1 <= size <= maximum:
        raise CheckpointError(f"{name} in {section.place} must be 1 to {maximum}, got {size}. Restore the file.")
    return size
