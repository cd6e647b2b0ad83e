"""The model interface that the drafter and the engine use.

Legend: T flat tokens, H hidden_size, F target_states_size, V vocabulary. States and logits are in the model's dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn

from builders import AttentionSpec
from builders.errors import require
from spec_decode.model_api.attention import Attention, ContextAttention

KeepRows: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Select rows: [T, ...] -> [R, ...]."""
X = TypeVar("X", torch.Tensor, torch.Tensor | None)


class DraftInputs(NamedTuple):
    """What one forward of a draft reads, for T flat tokens.

    token_ids  int64 [T]; for a ContextBlockDraft [R, L], R blocks of L tokens
    hidden     [T, H], the state before each token; a ContextBlockDraft does not read it
    positions  int64 [T]
    attention  stores keys and values, and attends
    keep       selects the tokens whose states are wanted; None: all. Step 0 drafts from one token of each request; the
               others only provide keys and values, so a last layer that drops them after its attention saves work
    """

    token_ids: torch.Tensor
    hidden: torch.Tensor
    positions: torch.Tensor
    attention: Attention
    keep: KeepRows | None = None

    def kept(self, x: X) -> X:
        """Return the rows of x [T, ...] that are wanted; None if x is None."""
        return x if x is None or self.keep is None else self.keep(x)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """Layers of one model with the same attention spec. They share a backend and a block table."""

    name: str
    spec: AttentionSpec
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TargetStates:
    """The output of a target's forward.

    hidden                [T, H], the input of `logits`
    target_hidden_states  [T, F], the states that a draft reads
    """

    hidden: torch.Tensor
    target_hidden_states: torch.Tensor


class _Model(nn.Module, ABC):
    """Parameters live on one device, in one dtype except for those that kernels read in fp32."""

    vocab_size: int
    hidden_size: int
    target_states_size: int
    max_positions: int

    @property
    def batch_invariant(self) -> bool:
        """Whether, under `batch_invariance`, the bits of a token's states and logits do not depend on the other tokens.
        True if this library's layers compute all sums and the attention is batch invariant."""
        return False

    @abstractmethod
    def layer_groups(self, page_size: int) -> list[LayerGroup]:
        """Return every attention layer, each in one group, in the model's dtype, for pages of page_size tokens."""


class TargetModel(_Model):
    """A causal language model over flat tokens.

    vocab_size; hidden_size H; max_positions; target_states_size F: dims of the states that a draft reads.
    """

    num_layers: int | None = None
    """The number of layers, or None if unknown. If known, a draft that reads states of other layers is rejected."""

    aux_hidden_state_layers: tuple[int, ...] | None = None
    """The layers whose input states, concatenated, are target_hidden_states; None if unknown."""

    @property
    def output_projection(self) -> torch.Tensor | None:
        """[V, H], if `logits` is a plain product with it; None if `logits` does more, or the model does not say."""
        return None

    @abstractmethod
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> TargetStates:
        """Compute the states of T tokens.

        token_ids  int64 [T]
        positions  int64 [T]
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, V] for hidden [T, H]."""


class DraftModel(_Model):
    """One drafting step over flat tokens; later steps start from the draft's own states. The subclasses below instead
    propose all tokens of a round in step 0.

    vocab_size is the target's; hidden_size H: dims of the states passed from step to step; target_states_size F: dims
    of the target's states that step 0 reads.
    """

    position_offset: ClassVar[int] = 0
    """0: position p pairs token p + 1 with the state at p (EAGLE, MTP). 1: the input at p is token p, as in any
    language model, so the same token is one position later."""

    token_map: torch.Tensor | None = None
    """int64 [draft vocabulary]: the target's id of each token that `logits` scores; None: the target's vocabulary."""

    drafts_at_once: ClassVar[bool] = False
    """Whether step 0 proposes all tokens of a round, so there are no later steps."""

    @property
    def trained_num_tokens(self) -> int | None:
        """The tokens a round that the draft was made to propose; None: it drafts as many as you ask for."""
        return None

    def check_num_tokens(self, num_speculative_tokens: int) -> None:
        """Raise BatchError if the draft cannot propose this many tokens a round."""

    def combine(self, target_hidden_states: torch.Tensor) -> torch.Tensor:
        """Map the target's states [T, F] to the states [T, H] that step 0 starts from; by default the identity."""
        return target_hidden_states

    @abstractmethod
    def forward(self, inputs: DraftInputs) -> torch.Tensor:
        """Return states [T, H] that predict the token after each of token_ids; with `keep`, only those it selects."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, draft vocabulary] for hidden [T, H], the output of `forward`."""


class BlockDraft(DraftModel):
    """Proposes K tokens in one forward over the verified tokens and masks; each position predicts the next token."""

    drafts_at_once: ClassVar[bool] = True

    mask_token_id: int
    """The placeholder for a token to be drafted."""

    mask_hidden: torch.Tensor | None = None
    """[F] in the dtype of states: the input of a mask instead of the target's states; None: zeros."""


class ContextBlockDraft(DraftModel):
    """Proposes all K tokens in one forward over a block: the next token followed by masks.

    The context that a block attends to is made from the target's states only, by `write_context`.
    """

    drafts_at_once: ClassVar[bool] = True

    mask_token_id: int
    """The placeholder for a token to be drafted."""

    first_place: int = 1
    """The position in the block that predicts the first token. 1: each of K masks predicts the token at its own
    position. 0: the next token and K - 1 masks each predict the token after their position."""

    block_size: int | None = None
    """The positions of a block that the draft was trained on, including the next token; None: the checkpoint does not
    say."""

    @property
    def trained_num_tokens(self) -> int | None:
        """The tokens that a block of block_size predicts, or None. A longer block can be drafted, and a target verifies
        its tokens as any others, but the draft has never seen one."""
        return None if self.block_size is None else self.block_size - self.first_place

    @abstractmethod
    def forward(self, inputs: DraftInputs) -> torch.Tensor:
        """Return states [T, H] of R blocks."""

    @abstractmethod
    def write_context(self, states: torch.Tensor, positions: torch.Tensor, attention: ContextAttention) -> None:
        """Store the keys and values of T verified tokens in every layer.

        states     [T, H], the output of `combine`
        positions  int64 [T]
        """


class InTurnBlockDraft(ContextBlockDraft):
    """Computes a block's states in one forward, then samples its tokens in order: each token biases the next logits."""

    @property
    def confidence(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
        """A function of the states [T, H] that tokens were drafted from and the tokens before them, int64 [T]: the
        probability that the target accepts each token, fp32 [T]. None: use the token's own probability."""
        return None

    @abstractmethod
    def bias_after(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the bias of the logits after each of token_ids, int64 [T]: [T, draft vocabulary]."""


class SelectingBlockDraft(ContextBlockDraft):
    """Computes a block's states in one forward, then samples each token in order from the top candidates of its
    position. sum(predecessors[previous token] * gates(state) * successors[candidate]) biases a candidate's logit.

    The logits cover the target's whole vocabulary.
    """

    num_candidates: int
    """How many of the most likely tokens can be sampled at each position."""

    @property
    @abstractmethod
    def codebooks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tables of predecessors and successors, [V, N] each."""

    @abstractmethod
    def gates(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [T, N] for hidden [T, H], the output of `forward`."""


class ModuleDraft(DraftModel):
    """A chain of modules, one for each token of the round. `forward` and `logits` are those of the first."""

    drafts_at_once: ClassVar[bool] = True

    @property
    @abstractmethod
    def prediction_modules(self) -> tuple[DraftModel, ...]:
        """The modules, in the order of their tokens. The first reads the target's states. Each later one reads the
        states of the module before it, at the same positions, and the token ids of one position later."""

    @property
    def trained_num_tokens(self) -> int:
        """The number of modules."""
        return len(self.prediction_modules)

    def check_num_tokens(self, num_speculative_tokens: int) -> None:
        """Raise BatchError if there are fewer modules than tokens a round."""
        count = self.trained_num_tokens
        require(
            num_speculative_tokens <= count,
            f"num_speculative_tokens must be at most {count}, the number of the draft's prediction modules, got "
            f"{num_speculative_tokens}. Lower it.",
        )
