"""A Llama-style target and its EAGLE draft, small enough to ship, and how a pair is stored."""

from spec_decode.models.checkpoint import SHIPPED_PAIR, CheckpointError, load_pair, save_pair
from spec_decode.models.config import ModelConfig
from spec_decode.models.eagle import DraftModel, EagleDraft
from spec_decode.models.layers import Attend
from spec_decode.models.llama import LlamaTarget

__all__ = [
    "SHIPPED_PAIR",
    "Attend",
    "CheckpointError",
    "DraftModel",
    "EagleDraft",
    "LlamaTarget",
    "ModelConfig",
    "load_pair",
    "save_pair",
]
