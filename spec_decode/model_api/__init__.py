"""The interface between models and what runs them: the drafter, the paged cache and the engine."""

from spec_decode.model_api.attention import Attention, AttentionInputs, ContextAttention
from spec_decode.model_api.base import (
    BlockDraft,
    ContextBlockDraft,
    DraftInputs,
    DraftModel,
    InTurnBlockDraft,
    KeepRows,
    LayerGroup,
    ModuleDraft,
    SelectingBlockDraft,
    TargetModel,
    TargetStates,
)
from spec_decode.model_api.batch_invariance import batch_invariance, is_batch_invariant

__all__ = [
    "Attention",
    "AttentionInputs",
    "BlockDraft",
    "ContextAttention",
    "ContextBlockDraft",
    "DraftInputs",
    "DraftModel",
    "InTurnBlockDraft",
    "KeepRows",
    "LayerGroup",
    "ModuleDraft",
    "SelectingBlockDraft",
    "TargetModel",
    "TargetStates",
    "batch_invariance",
    "is_batch_invariant",
]
