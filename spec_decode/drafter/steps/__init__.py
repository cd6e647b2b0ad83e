"""The device work of a round, by what the draft proposes in a step: a token, a tree, a block, or a token a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from builders import RequestTables
from spec_decode.drafter.config import DrafterConfig
from spec_decode.drafter.plan import DraftPlan
from spec_decode.drafter.steps.block_step import BlockStep
from spec_decode.drafter.steps.context_block_step import ContextBlockStep, InTurnBlockStep
from spec_decode.drafter.steps.draft_step import DraftStep
from spec_decode.drafter.steps.module_step import ModuleStep
from spec_decode.drafter.steps.selecting_block_step import SelectingBlockStep
from spec_decode.drafter.steps.step import Drafts, Step
from spec_decode.drafter.steps.tree_step import TreeStep
from spec_decode.models import (
    BlockDraft,
    ContextBlockDraft,
    DraftModel,
    InTurnBlockDraft,
    ModuleDraft,
    SelectingBlockDraft,
)
from spec_decode.paged.kv_groups import KVGroup

__all__ = ["Drafts", "Step", "make_step"]

_STEPS: dict[type, type[Step[Any, Any]]] = {
    BlockDraft: BlockStep,
    ContextBlockDraft: ContextBlockStep,
    InTurnBlockDraft: InTurnBlockStep,
    SelectingBlockDraft: SelectingBlockStep,
    ModuleDraft: ModuleStep,
    DraftModel: DraftStep,
}
"""The step of each kind of draft."""


def make_step(
    model: DraftModel, groups: Sequence[KVGroup], tables: RequestTables, config: DrafterConfig, plan: DraftPlan
) -> Step[Any, Any]:
    """The step of the model's kind, or of trees. Raises BatchError for tables without room for a round of it."""
    kind = next(kind for kind in type(model).__mro__ if kind in _STEPS)
    step = _STEPS[kind] if config.tree is None else TreeStep
    return step(model, groups, tables, config, plan)
