"""The device work of a round, by what a step of the draft proposes: a token, a tree, a block, or a token per module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from builders import RequestTables
from spec_decode.drafter.config import DrafterConfig
from spec_decode.drafter.plan import DraftPlan
from spec_decode.drafter.steps.block_step import BlockStep
from spec_decode.drafter.steps.draft_step import DraftStep
from spec_decode.drafter.steps.step import Drafts, Step
from spec_decode.drafter.steps.tree_step import TreeStep
from spec_decode.model_api import BlockDraft, ContextBlockDraft, DraftModel, ModuleDraft
from spec_decode.paged.kv_groups import KVGroup

__all__ = ["Drafts", "Step", "make_step"]


def make_step(
    model: DraftModel, groups: Sequence[KVGroup], tables: RequestTables, config: DrafterConfig, plan: DraftPlan
) -> Step[Any, Any]:
    """Make the step for the model's kind. Raises BatchError for tables without room for a round."""
    return _step_of(model, config)(model, groups, tables, config, plan)


def _step_of(model: DraftModel, config: DrafterConfig) -> type[Step[Any, Any]]:
    """Return the step for the model's kind; the rarer ones are loaded with the first drafter of their kind."""
    if isinstance(model, ContextBlockDraft):
        from spec_decode.drafter.steps.context_block_step import ContextBlockStep

        return ContextBlockStep
    if isinstance(model, ModuleDraft):
        from spec_decode.drafter.steps.module_step import ModuleStep

        return ModuleStep
    if isinstance(model, BlockDraft):
        return BlockStep
    return DraftStep if config.tree is None else TreeStep
