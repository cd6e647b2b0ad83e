"""A Llama-style target and its EAGLE drafts, small enough to ship, and how a pair is stored."""

from spec_decode.models.attention import Attention, AttentionInputs
from spec_decode.models.base import (
    BlockDraft,
    ContextBlockDraft,
    DraftModel,
    InTurnBlockDraft,
    LayerGroup,
    ModuleDraft,
    TargetModel,
    TargetStates,
)
from spec_decode.models.checkpoints.errors import CheckpointError
from spec_decode.models.config import LatentConfig, ModelConfig
from spec_decode.models.eagle import EagleDraft
from spec_decode.models.llama import LlamaTarget
from spec_decode.models.pair import SHIPPED_PAIR, draft_names, load_pair, load_target, save_draft, save_pair

__all__ = [
    "SHIPPED_PAIR",
    "Attention",
    "AttentionInputs",
    "BlockDraft",
    "CheckpointError",
    "ContextBlockDraft",
    "DraftModel",
    "EagleDraft",
    "InTurnBlockDraft",
    "LatentConfig",
    "LayerGroup",
    "LlamaTarget",
    "ModelConfig",
    "ModuleDraft",
    "TargetModel",
    "TargetStates",
    "draft_names",
    "load_pair",
    "load_target",
    "save_draft",
    "save_pair",
]
