"""DSpark as published: DFlash's block, with a Markov head that drafts the tokens in order and a confidence head."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from spec_decode.model_api import TargetModel, TokenBias
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import ScopedWeights, TensorStore
from spec_decode.models.decoder_config import DecoderConfig
from spec_decode.models.dflash import DFlash, load_as
from spec_decode.models.dflash import aux_hidden_state_layers as aux_hidden_state_layers
from spec_decode.models.draft_vocabulary import DraftVocabulary
from spec_decode.models.layers.linear import Embedding, Linear


class MarkovHead(nn.Module):
    """The low-rank bias that a token adds to the next logits."""

    def __init__(self, vocab_size: int, rank: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.markov_w1 = Embedding(vocab_size, rank)
        self.markov_w2 = Linear(rank, draft_vocab_size)


class ConfidenceHead(nn.Module):
    """Maps a state, optionally with the Markov head's embedding of the token before it, to one number."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)


class DSpark(DFlash):
    """Runs the next token and K - 1 masks through all layers at once, each predicting the token after its position; the
    previously drafted token biases the logits."""

    def __init__(
        self, weights: ScopedWeights, config: DecoderConfig, vocabulary: DraftVocabulary, target: TargetModel
    ) -> None:
        """As DFlash; raises CheckpointError for a rank below 1."""
        super().__init__(weights, config, vocabulary, target)
        fields, model = weights.store.config, config.model
        fields.require("markov_head_type", "vanilla")
        rank = fields.get("markov_rank", int)
        if rank < 1:
            raise CheckpointError(f"markov_rank in {fields.place} must be 1 or more, got {rank}. Restore the file.")
        self.first_place = 0 if fields.get("sample_from_anchor", bool, True) else 1
        self.markov_head = MarkovHead(vocabulary.embedded, rank, vocabulary.scored)
        self._with_markov = fields.get("confidence_head_with_markov", bool, False)
        inputs = model.hidden_size + rank * self._with_markov
        self.confidence_head = ConfidenceHead(inputs) if fields.get("enable_confidence_head", bool, False) else None

    @property
    def place_logits(self) -> TokenBias:
        """The Markov head's bias, with the confidence head if the checkpoint has one."""
        return TokenBias(self._bias_after, None if self.confidence_head is None else self._confidence)

    def _bias_after(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.markov_head.markov_w2.product(self.markov_head.markov_w1(token_ids))

    def _confidence(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        assert self.confidence_head is not None
        inputs = torch.cat([hidden, self.markov_head.markov_w1(previous)], -1) if self._with_markov else hidden
        proj = self.confidence_head.proj
        return F.linear(inputs.float(), proj.weight.float(), proj.bias.float())[:, 0].sigmoid()


def serves(store: TensorStore) -> bool:
    """Whether the checkpoint's tensors have DSpark's names."""
    return "markov_head.markov_w1.weight" in store.names()


def load(store: TensorStore, target: TargetModel, *, dtype: torch.dtype, device: torch.device) -> DSpark:
    """Load the draft, ready to run. Raises CheckpointError."""
    return load_as(DSpark, store, target, dtype=dtype, device=device)
