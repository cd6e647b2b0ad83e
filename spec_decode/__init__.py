"""Speculative decoding over attention backends whose metadata advances in place.

Start with `LLM` and `SamplingParams`. They are imported on first use because they import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from builders import BatchError
    from spec_decode.llm import LLM, Completion, SamplingParams, TextChunk
    from spec_decode.models import CheckpointError

    __version__: str

__all__ = ["LLM", "BatchError", "CheckpointError", "Completion", "SamplingParams", "TextChunk"]

_MODULES = {"__version__": "attn_backends", "BatchError": "builders", "CheckpointError": "spec_decode.models"}
"""Where to find what is not from spec_decode.llm."""


def __getattr__(name: str) -> Any:
    if name not in __all__ and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "spec_decode.llm")), name)
