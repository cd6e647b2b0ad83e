"""Speculative decoding over attention backends whose metadata advances in place.

Start with `LLM` and `SamplingParams`. They are imported on first use because they import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spec_decode.llm import LLM, Completion, SamplingParams, TextChunk

__all__ = ["LLM", "Completion", "SamplingParams", "TextChunk"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from spec_decode import llm

    return getattr(llm, name)
