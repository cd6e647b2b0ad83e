"""The multi-step drafter: its plan, its strategies, and what they run over."""

from spec_decode.drafter.config import DrafterConfig
from spec_decode.drafter.drafter import Drafter, Drafts, StepMetadata, default_capture_sizes, padded_size
from spec_decode.drafter.metadata_plan import GraphMode
from spec_decode.drafter.plan import StrategyError
from spec_decode.drafter.strategies import Strategy
from spec_decode.drafter.verified_tokens import VerifiedTokens

__all__ = [
    "Drafter",
    "DrafterConfig",
    "Drafts",
    "GraphMode",
    "StepMetadata",
    "Strategy",
    "StrategyError",
    "VerifiedTokens",
    "default_capture_sizes",
    "padded_size",
]
