"""Drafts that propose all tokens of a round in step 0: from a block, from a block over a context, or from a chain of
modules.

Legend: T flat tokens, H hidden_size, F target_states_size. States and logits are in the model's dtype.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

from builders.errors import require
from spec_decode.model_api.attention import ContextAttention
from spec_decode.model_api.base import DraftInputs, DraftModel
from spec_decode.model_api.place_logits import CandidateTable, TokenBias
from spec_decode.model_api.round_shape import RoundShape, require_choices

if TYPE_CHECKING:
    from spec_decode.trees import Tree


class BlockDraft(DraftModel):
    """Proposes K tokens in one forward over the verified tokens and masks; each position predicts the next token."""

    drafts_at_once: ClassVar[bool] = True

    mask_token_id: int
    """The placeholder for a token to be drafted."""

    mask_hidden: torch.Tensor | None = None
    """[F] in the dtype of states: the input of a mask instead of the target's states; None: zeros."""

    def round_shape(self, num_speculative_tokens: int, tree: Tree | None = None) -> RoundShape:
        """See DraftModel. Up to 1 + K verified tokens, then a mask for each draft token but the first."""
        if tree is not None:
            require_choices(tree, self.num_choices)
        places = 2 * num_speculative_tokens
        return RoundShape(step_0_len=places, places=places, slots=places)


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
    def place_logits(self) -> TokenBias | CandidateTable | None:
        """How the token at one place of a block changes the logits of the next; None: it does not, so the tokens of all
        places are drawn at once."""
        return None

    @property
    def num_choices(self) -> int:
        """How many tokens can follow a token."""
        rule = self.place_logits
        return rule.num_candidates if isinstance(rule, CandidateTable) else super().num_choices

    def round_shape(self, num_speculative_tokens: int, tree: Tree | None = None) -> RoundShape:
        """See DraftModel. The 1 + K verified tokens become context, which needs no row of step 0.

        Raises BatchError for a tree that the draft cannot propose, and for a wrong place_logits or first_place.
        """
        steps, rule = num_speculative_tokens, self.place_logits
        require(self.first_place in (0, 1), f"first_place is {self.first_place!r}. Set it to 0 or 1: see the class.")
        _check_rule(rule, self)
        if tree is not None:
            require_choices(tree, self.num_choices)
            if rule is not None:
                tree.require_steps(steps)
        return RoundShape(step_0_len=steps + self.first_place, places=1 + steps, slots=2 * steps)

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


def _check_rule(rule: object, model: ContextBlockDraft) -> None:
    require(
        rule is None or isinstance(rule, TokenBias | CandidateTable),
        f"place_logits must be a TokenBias, a CandidateTable or None, got {type(rule).__name__}. Return one of them.",
    )
    if not isinstance(rule, CandidateTable):
        return
    vocab = model.vocab_size
    require(
        model.token_map is None,
        "a draft with a CandidateTable must score the target's whole vocabulary, got one with a token_map; its ids "
        "would be taken for the target's. Score every token, or return a TokenBias.",
    )
    require(
        1 <= rule.num_candidates <= vocab,
        f"num_candidates must be 1 to the {vocab} tokens of the vocabulary, got {rule.num_candidates}. Change it.",
    )
    for name, table in (("predecessors", rule.predecessors), ("successors", rule.successors)):
        require(
            table.dim() == 2 and len(table) == vocab and table.shape == rule.predecessors.shape,
            f"{name} must be [{vocab}, N] as the other table, got {list(table.shape)}. Give every token a row.",
        )


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

    def round_shape(self, num_speculative_tokens: int, tree: Tree | None = None) -> RoundShape:
        """See DraftModel. The 1 + K verified tokens and the K - 1 before them, which later modules read again.

        Raises BatchError for more tokens than modules, and for a tree.
        """
        count = self.trained_num_tokens
        require(
            num_speculative_tokens <= count,
            f"num_speculative_tokens must be at most {count}, the number of the draft's prediction modules, got "
            f"{num_speculative_tokens}. Lower it.",
        )
        require(
            tree is None,
            "a tree needs a draft that runs step by step or proposes a block; this one has a module for each token, "
            "so a token's children would never be drafted. Pass no tree, or use another draft.",
        )
        places = 2 * num_speculative_tokens
        return RoundShape(step_0_len=places, places=places, slots=places)
