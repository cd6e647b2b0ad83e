"""What the drafter and the engine need of a model.

Legend: T flat tokens, H hidden_size, F target_states_size, V vocabulary. States and logits are in the model's dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import nn

from builders import AttentionSpec
from builders.errors import require
from spec_decode.models.attention import Attention, ContextAttention

KeepRows: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Takes something of every token, [T, ...], and returns that of the tokens that are wanted, [R, ...]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """Layers of one model that share attention of one shape, hence a backend and a block table."""

    name: str
    spec: AttentionSpec
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TargetStates:
    """What a target's forward returns.

    hidden                [T, H], what `logits` reads
    target_hidden_states  [T, F], what a draft reads of the target
    """

    hidden: torch.Tensor
    target_hidden_states: torch.Tensor


class _Model(nn.Module, ABC):
    """Parameters live on one device, in one dtype but for those that kernels take in fp32."""

    vocab_size: int
    hidden_size: int
    target_states_size: int
    max_positions: int

    @property
    def batch_invariant(self) -> bool:
        """Whether, under `batch_invariance`, no bit of a token's states and logits depends on the other tokens: true
        where all sums are those of the layers here, and of attention that is batch invariant."""
        return False

    @abstractmethod
    def layer_groups(self, page_size: int) -> list[LayerGroup]:
        """Every layer with attention, each in one group, in the model's dtype, over pages of page_size tokens."""


class TargetModel(_Model):
    """A causal language model over flat tokens.

    vocab_size; hidden_size H; max_positions; target_states_size F: dims of the states that a draft reads.
    """

    num_layers: int | None = None
    """How many it has, where it says so: a draft that reads states of others is refused."""

    aux_hidden_state_layers: tuple[int, ...] | None = None
    """The layers whose incoming states, side by side, are target_hidden_states, where it says so."""

    @property
    def output_projection(self) -> torch.Tensor | None:
        """[V, H], where `logits` is the product with it and nothing else; None: it is more, or does not say."""
        return None

    @abstractmethod
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> TargetStates:
        """The states of T tokens.

        token_ids  int64 [T]
        positions  int64 [T]
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] of hidden [T, H]."""


class DraftModel(_Model):
    """One step of drafting over flat tokens: later steps start from its own states. The kinds below propose all tokens
    of a round in step 0.

    vocab_size is the target's; hidden_size H: dims of the states handed from step to step; target_states_size F: dims
    of the target's states that step 0 reads.
    """

    position_offset: ClassVar[int] = 0
    """0: position p pairs token p + 1 with the state at p (EAGLE, MTP). 1: the input at p is token p, as in any
    language model, so that the same token lies one position later."""

    token_map: torch.Tensor | None = None
    """int64 [own vocabulary]: the target's id of each token that `logits` scores; None: the target's vocabulary."""

    drafts_at_once: ClassVar[bool] = False
    """Whether all tokens of a round come from step 0, so that no later steps follow it."""

    def check_num_tokens(self, num_speculative_tokens: int) -> None:
        """Raise BatchError for more tokens a round than it can propose."""

    def combine(self, target_hidden_states: torch.Tensor) -> torch.Tensor:
        """The states [T, H] that step 0 starts from, made of the target's [T, F]; by default those themselves."""
        return target_hidden_states

    @abstractmethod
    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """States [T, H] that predict the token after each of token_ids.

        token_ids  int64 [T]
        hidden     [T, H], the state before each of them
        positions  int64 [T]
        """

    def forward_kept(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        keep: KeepRows,
    ) -> torch.Tensor:
        """keep(forward(token_ids, hidden, positions, attention)), [R, H]: step 0 drafts from one token of each request,
        the others are there for their keys and values. A model whose last layer drops them after its attention computes
        that much less."""
        return keep(self.forward(token_ids, hidden, positions, attention))

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [T, own vocabulary] of hidden [T, H], as `forward` returns it."""


class BlockDraft(DraftModel):
    """All K tokens come from one forward over the verified tokens and masks, each token from the place before it."""

    drafts_at_once: ClassVar[bool] = True

    mask_token_id: int
    """The token in the place of one that is not drafted yet."""

    mask_hidden: torch.Tensor | None = None
    """[F] in the dtype of states: what a mask has of the target, in place of states; None: zeros."""


class ContextBlockDraft(DraftModel):
    """All K tokens come from one forward over a block: the next token, and masks after it.

    What a block attends to before itself is made of the target's states alone, by `write_context`.
    """

    drafts_at_once: ClassVar[bool] = True

    mask_token_id: int
    """The token in the place of one that is not drafted yet."""

    first_place: int = 1
    """The place of the block that predicts the first token. 1: each of K masks predicts the token in its own place. 0:
    the next token and K - 1 masks predict the token after their places."""

    @abstractmethod
    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """States [T, H] of R blocks of L tokens each.

        token_ids  int64 [R, L]
        hidden     not read
        positions  int64 [T]
        """

    @abstractmethod
    def write_context(self, states: torch.Tensor, positions: torch.Tensor, attention: ContextAttention) -> None:
        """Store what every layer attends to of T verified tokens.

        states     [T, H] as `combine` makes them
        positions  int64 [T]
        """


class InTurnBlockDraft(ContextBlockDraft):
    """A block's places are computed at once, and its tokens drawn in turn: each shifts the logits of the next."""

    @property
    def confidence(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
        """Takes the states [T, H] that tokens were drafted from and the tokens before them, int64 [T]; returns how
        probable it is that the target keeps each, fp32 [T]. None: a token's own probability says it."""
        return None

    @abstractmethod
    def bias_after(self, token_ids: torch.Tensor) -> torch.Tensor:
        """What is added to the logits of the place after each of token_ids int64 [T]: [T, own vocabulary]."""


class SelectingBlockDraft(ContextBlockDraft):
    """A block's places are computed at once, and each token is drawn in turn among the likeliest of its place: to a
    candidate's logit comes the sum of predecessors[the token before it] * gates(state) * successors[the candidate].

    Its logits are the target's whole vocabulary's.
    """

    num_candidates: int
    """Tokens of a place that may be drawn, the likeliest."""

    @property
    @abstractmethod
    def codebooks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[V, N] of predecessors and of successors."""

    @abstractmethod
    def gates(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, N] of hidden [T, H], as `forward` returns it."""


class ModuleDraft(DraftModel):
    """A module for each token of the round. `forward` and `logits` are those of the first."""

    drafts_at_once: ClassVar[bool] = True

    @property
    @abstractmethod
    def prediction_modules(self) -> tuple[DraftModel, ...]:
        """In the order of their tokens. The first reads the target's states, each other one those of the module before
        it, at the same positions, and token_ids of one position later."""

    def check_num_tokens(self, num_speculative_tokens: int) -> None:
        """Raise BatchError for more tokens a round than there are modules."""
        count = len(self.prediction_modules)
        require(
            num_speculative_tokens <= count,
            f"a draft with a prediction module for each token proposes at most {count} a round, got "
            f"num_speculative_tokens {num_speculative_tokens}; no module was trained for the others. "
            f"Lower it to {count} or less.",
        )


class KeptRowsDraft(DraftModel):
    """Its last layer leaves tokens out after its attention."""

    @abstractmethod
    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        keep: KeepRows | None = None,
    ) -> torch.Tensor:
        """See the base; with `keep` the states [R, H] of the tokens that it keeps."""

    def forward_kept(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        keep: KeepRows,
    ) -> torch.Tensor:
        """See the base."""
        return self.forward(token_ids, hidden, positions, attention, keep)
