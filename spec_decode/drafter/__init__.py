"""The multi-step drafter: its configuration, its plan, and the strategies that run it."""

from spec_decode.drafter.config import DrafterConfig, check_draft
from spec_decode.drafter.drafter import Drafter, StepMetadata
from spec_decode.drafter.plan import DraftPlan, StrategyError, plan_draft
from spec_decode.drafter.steps import Drafts
from spec_decode.drafter.strategies import Strategy
from spec_decode.drafter.verified_tokens import VerifiedTokens

__all__ = [
    "DraftPlan",
    "Drafter",
    "DrafterConfig",
    "Drafts",
    "StepMetadata",
    "Strategy",
    "StrategyError",
    "VerifiedTokens",
    "check_draft",
    "plan_draft",
]
