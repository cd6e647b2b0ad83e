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
from spec_decode.model_api import (
    BlockDraft,
    ContextBlockDraft,
    DraftModel,
    InTurnBlockDraft,
    ModuleDraft,
    SelectingBlockDraft,
)
from spec_decode.paged.kv_groups import KVGroup

__all__ = ["Drafts", "Step", "make_step"]


def make_step(
    model: DraftModel, groups: Sequence[KVGroup], tables: RequestTables, config: DrafterConfig, plan: DraftPlan
) -> Step[Any, Any]:
    """Make the step for the model's kind. config: must pass `check_draft`. Raises BatchError for tables without room
    for a round."""
    step, tree_step = _steps_of(model)
    return (step if config.tree is None else tree_step)(model, groups, tables, config, plan)


def _steps_of(model: DraftModel) -> tuple[type[Step[Any, Any]], type[Step[Any, Any]]]:
    """Return the step for the model's kind, and its step for trees. Kinds with samplers or batches of their own are
    loaded for their drafts only."""
    if isinstance(model, ModuleDraft):
        from spec_decode.drafter.steps.module_step import ModuleStep

        return ModuleStep, ModuleStep  # check_draft lets no module draft trees
    if isinstance(model, ContextBlockDraft):
        from spec_decode.drafter.steps.context_block_step import ContextBlockStep, InTurnBlockStep, SelectingBlockStep
        from spec_decode.drafter.steps.in_turn_tree_step import InTurnTreeStep, SelectingTreeStep

        if isinstance(model, InTurnBlockDraft):
            return InTurnBlockStep, InTurnTreeStep
        if isinstance(model, SelectingBlockDraft):
            return SelectingBlockStep, SelectingTreeStep
        return ContextBlockStep, ContextBlockStep
    return (BlockStep, BlockStep) if isinstance(model, BlockDraft) else (DraftStep, TreeStep)
