"""The interface between models and what runs them: the drafter, the paged cache and the engine."""

from attn_backends.kernels.linear.batch_invariance import batch_invariance, is_batch_invariant
from spec_decode.model_api.attention import Attention, AttentionInputs, ContextAttention, RecurrentAttention
from spec_decode.model_api.base import (
    DraftInputs,
    DraftModel,
    KeepRows,
    LayerGroup,
    TargetModel,
    TargetStates,
)
from spec_decode.model_api.draft_kinds import BlockDraft, ContextBlockDraft, ModuleDraft
from spec_decode.model_api.place_logits import CandidateTable, TokenBias
from spec_decode.model_api.round_shape import RoundShape

__all__ = [
    "Attention",
    "AttentionInputs",
    "BlockDraft",
    "CandidateTable",
    "ContextAttention",
    "ContextBlockDraft",
    "DraftInputs",
    "DraftModel",
    "KeepRows",
    "LayerGroup",
    "ModuleDraft",
    "RecurrentAttention",
    "RoundShape",
    "TargetModel",
    "TargetStates",
    "TokenBias",
    "batch_invariance",
    "is_batch_invariant",
]
