"""Totals of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineStats:
    """Totals since the last generate() began, or since the engine was made."""

    rounds: int = 0
    propose_seconds: float = 0.0
    """Wall time of the propose() calls, from call to return."""
    accepted: int = 0
    """Draft tokens kept, over drafted_for rows of all rounds. A row that runs once more after its end counts in rounds
    alone."""
    drafted_for: int = 0
    new_tokens: int = 0
    """Tokens that the host has read, stop ids included."""
    prefill_tokens: int = 0
    """Of prompts, and of texts that go on after one of the preemptions."""
    preemptions: int = 0

    @property
    def mean_accepted(self) -> float:
        """Draft tokens kept per request and round."""
        return self.accepted / max(1, self.drafted_for)

    @property
    def host_us_a_round(self) -> float:
        """Wall time of propose() a round, in microseconds."""
        return 1e6 * self.propose_seconds / max(1, self.rounds)
