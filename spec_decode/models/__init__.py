"""Target and draft models: this library's own small Llama-style pair, and models loaded from folders.

`TransformersTarget` is imported on first use, because it pulls in transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.config import LatentConfig, ModelConfig
from spec_decode.models.eagle import EagleDraft
from spec_decode.models.llama import LlamaTarget
from spec_decode.models.load import load_draft
from spec_decode.models.pair import SHIPPED_PAIR, draft_names, load_pair, load_target, save_draft, save_pair
from spec_decode.models.quantise import quantise_draft

if TYPE_CHECKING:
    from spec_decode.models.hf.target import TransformersTarget

__all__ = [
    "SHIPPED_PAIR",
    "CheckpointError",
    "EagleDraft",
    "LatentConfig",
    "LlamaTarget",
    "ModelConfig",
    "TransformersTarget",
    "draft_names",
    "load_draft",
    "load_pair",
    "load_target",
    "quantise_draft",
    "save_draft",
    "save_pair",
]


def __getattr__(name: str) -> Any:
    if name != "TransformersTarget":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from spec_decode.models.hf.target import TransformersTarget

    return TransformersTarget
