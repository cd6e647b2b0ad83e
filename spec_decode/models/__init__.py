"""A Llama-style target and its EAGLE drafts, small enough to ship, and how a pair is stored."""

from spec_decode.models.base import Attend, DraftModel, LayerGroup, TargetModel, TargetStates
from spec_decode.models.checkpoint import (
    SHIPPED_PAIR,
    CheckpointError,
    draft_names,
    load_pair,
    load_target,
    save_draft,
    save_pair,
)
from spec_decode.models.config import LatentConfig, ModelConfig
from spec_decode.models.eagle import EagleDraft
from spec_decode.models.llama import LlamaTarget

__all__ = [
    "SHIPPED_PAIR",
    "Attend",
    "CheckpointError",
    "DraftModel",
    "EagleDraft",
    "LatentConfig",
    "LayerGroup",
    "LlamaTarget",
    "ModelConfig",
    "TargetModel",
    "TargetStates",
    "draft_names",
    "load_pair",
    "load_target",
    "save_draft",
    "save_pair",
]
