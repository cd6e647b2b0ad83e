"""The model interface that the drafter and the engine use.

Legend: T flat tokens, H hidden_size, F target_states_size, V vocabulary. States and logits are in the model's dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn
from typing_extensions import TypeVar as DefaultTypeVar

from builders import AttentionSpec, StateSpec
from builders.errors import require
from spec_decode.model_api.attention import Attention
from spec_decode.model_api.round_shape import RoundShape, require_choices

if TYPE_CHECKING:
    from spec_decode.trees import Tree

KeepRows: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Select rows: [T, ...] -> [R, ...]."""
X = TypeVar("X", torch.Tensor, torch.Tensor | None)
S = DefaultTypeVar("S", AttentionSpec, StateSpec, default=AttentionSpec)


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
class LayerGroup(Generic[S]):
    """Layers of one model with the same spec, by default of attention. They share a backend and a block table."""

    name: str
    spec: S
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
    kv_scales: Mapping[int, tuple[float, float]] = {}
    """Layer -> what an 8-bit cache's keys and values are multiplied by, as calibrated; a layer without has 1."""

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

    def state_groups(self, journal: int) -> list[LayerGroup[StateSpec]]:
        """Return every recurrent layer, each in one group, for journals of so many tokens; by default none."""
        return []

    @abstractmethod
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> TargetStates:
        """Compute the states of T tokens.

        token_ids  int64 [T]
        positions  int64 [T]
        attention  of a model with state groups, a RecurrentAttention
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, V] for hidden [T, H]."""


class DraftModel(_Model):
    """One drafting step over flat tokens; later steps start from the draft's own states. The kinds in
    draft_kinds instead propose all tokens of a round in step 0.

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

    @property
    def num_choices(self) -> int:
        """How many tokens can follow a token: all that `logits` scores."""
        return self.vocab_size if self.token_map is None else len(self.token_map)

    def round_shape(self, num_speculative_tokens: int, tree: Tree | None = None) -> RoundShape:
        """Return what a round of K tokens in sequence, or of a tree at most K deep, takes of a request's places.

        Raises BatchError for a K or a tree that the draft cannot propose.
        """
        require(
            not self.drafts_at_once,
            f"{type(self).__name__} drafts at once, so it must say how. Make it a BlockDraft, ContextBlockDraft or "
            "ModuleDraft.",
        )
        steps = num_speculative_tokens
        if tree is None:
            return RoundShape(step_0_len=1 + steps, places=1 + steps, slots=steps)
        require_choices(tree, self.num_choices)
        tree.require_steps(steps)
        tree.require_frontiers(steps)
        frontiers = tree.width * (steps - 1)
        # Places for step 0, or for the last verified token and all frontiers after it.
        return RoundShape(step_0_len=1 + steps, places=max(1 + steps, 2 + frontiers), slots=max(steps, frontiers))

    def combine(self, target_hidden_states: torch.Tensor) -> torch.Tensor:
        """Map the target's states [T, F] to the states [T, H] that step 0 starts from; by default the identity."""
        return target_hidden_states

    @abstractmethod
    def forward(self, inputs: DraftInputs) -> torch.Tensor:
        """Return states [T, H] that predict the token after each of token_ids; with `keep`, only those it selects."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, draft vocabulary] for hidden [T, H], the output of `forward`."""
