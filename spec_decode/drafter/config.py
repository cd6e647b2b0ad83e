"""The settings of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from builders.errors import require
from spec_decode.drafter.metadata_plan import GraphMode
from spec_decode.drafter.strategies import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """How a drafter drafts. Raises BatchError for a min_confidence that is not a probability below 1."""

    num_speculative_tokens: int
    """K: tokens that a round proposes, at most."""
    graph_mode: GraphMode = GraphMode.FULL
    strategy: Strategy | None = None
    """None chooses the one with the least host work that every group can run."""
    capture_sizes: Sequence[int] | None = None
    """Numbers of requests to capture graphs for; None is `default_capture_sizes`."""
    min_confidence: float = 0.0
    """A request stops after a token to which the draft gives a lower probability, at the request's temperature."""
    graph_memory_limit: int | None = None
    """Bytes for the graphs; sizes that would not fit are left out."""
    extend_in_graph: bool = True
    """False runs step 0 eagerly and leaves the later steps to the plan, for comparison; the tokens are the same."""

    def __post_init__(self) -> None:
        require(
            0.0 <= self.min_confidence < 1.0,
            f"min_confidence must be a probability below 1, got {self.min_confidence}; every draft would end at its "
            "first token. Pass 0 to draft on whatever the confidence.",
        )
