"""Text in, text out: load a model and its draft from folders, with batching, streaming and stop strings."""

from spec_decode.llm.llm import LLM
from spec_decode.llm.outputs import Completion, TextChunk
from spec_decode.sampling import SamplingParams

__all__ = ["LLM", "Completion", "SamplingParams", "TextChunk"]
