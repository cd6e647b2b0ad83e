"""The multi-step drafter: its plan, its strategies, and what they run over."""

from spec_decode.drafter.config import DrafterConfig
from spec_decode.drafter.drafter import Drafter, Drafts, InUse, VerifiedTokens, default_capture_sizes

__all__ = ["Drafter", "DrafterConfig", "Drafts", "InUse", "VerifiedTokens", "default_capture_sizes"]
