"""An engine that serves many requests at once; spec_decode.engine.engine describes a step."""

from spec_decode.engine.config import EngineConfig
from spec_decode.engine.engine import Engine
from spec_decode.engine.outputs import EngineStats
from spec_decode.engine.request import FinishReason, Generation, Handle, Request
from spec_decode.engine.round_plan import RoundPlan

__all__ = ["Engine", "EngineConfig", "EngineStats", "FinishReason", "Generation", "Handle", "Request", "RoundPlan"]
