"""Text in, text out: a model and its draft from their folders, with batching, streaming and stop strings."""

from spec_decode.llm.llm import LLM
from spec_decode.llm.outputs import Chunk, Completion
from spec_decode.llm.sampling_params import SamplingParams

__all__ = ["LLM", "Chunk", "Completion", "SamplingParams"]
