"""What settings of a drafter ask of its model."""

from __future__ import annotations

from builders.errors import require
from spec_decode.drafter.config import DrafterConfig
from spec_decode.models import BlockDraft, ContextBlockDraft, DraftModel, InTurnBlockDraft, SelectingBlockDraft
from spec_decode.trees import DraftTree, DynamicTreeConfig
from spec_decode.trees.draft_tree import require_frontiers


def check_draft(model: DraftModel, config: DrafterConfig) -> None:
    """Raise BatchError for more tokens a round than the model can propose, and for a tree that it cannot draft."""
    model.check_num_tokens(config.num_speculative_tokens)
    if config.tree is not None:
        _check_tree(model, config.tree, config.num_speculative_tokens)


def _check_tree(model: DraftModel, tree: DraftTree | DynamicTreeConfig, num_speculative_tokens: int) -> None:
    blocks = isinstance(model, BlockDraft | ContextBlockDraft)
    require(
        blocks or not model.drafts_at_once,
        "a tree needs a draft that goes step by step or proposes a block, this one has a module for each token; a "
        "token's children would never be drafted. Draft no tree, or use another draft.",
    )
    most = _choices(model)
    require(
        tree.max_children <= most,
        f"a tree may have as many choices after a token as the draft has, {most}, got {tree.max_children}; there are "
        "no more. Pass fewer choices.",
    )
    in_turn = not blocks or isinstance(model, InTurnBlockDraft | SelectingBlockDraft)
    if in_turn and isinstance(tree, DynamicTreeConfig):
        tree.require_steps(num_speculative_tokens)
    if not blocks:
        require_frontiers(tree.width, num_speculative_tokens)


def _choices(model: DraftModel) -> int:
    """The tokens that may follow another: candidates, or the draft's vocabulary."""
    if isinstance(model, SelectingBlockDraft):
        return model.num_candidates
    return model.vocab_size if model.token_map is None else len(model.token_map)
