"""The device work of a round, by what a step of the draft proposes: a token, a tree, a block, or a token per module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from builders import RequestTables
from spec_decode.drafter.config import DrafterConfig
from spec_decode.drafter.plan import DraftPlan
from spec_decode.drafter.steps.block_step import BlockStep
from spec_decode.drafter.steps.context_block_step import ContextBlockStep
from spec_decode.drafter.steps.draft_step import DraftStep
from spec_decode.drafter.steps.module_step import ModuleStep
from spec_decode.drafter.steps.step import Drafts, Step
from spec_decode.drafter.steps.tree_step import TreeStep
from spec_decode.model_api import BlockDraft, ContextBlockDraft, DraftModel, ModuleDraft
from spec_decode.paged.kv_groups import KVGroup

__all__ = ["Drafts", "Step", "make_step"]

_STEPS: dict[type, type[Step[Any, Any]]] = {
    BlockDraft: BlockStep,
    ContextBlockDraft: ContextBlockStep,
    ModuleDraft: ModuleStep,
    DraftModel: DraftStep,
}


def make_step(
    model: DraftModel, groups: Sequence[KVGroup], tables: RequestTables, config: DrafterConfig, plan: DraftPlan
) -> Step[Any, Any]:
    """Make the step for the model's kind. Raises BatchError for tables without room for a round."""
    step = next(_STEPS[kind] for kind in type(model).__mro__ if kind in _STEPS)
    if step is DraftStep and config.tree is not None:
        step = TreeStep
    return step(model, groups, tables, config, plan)
