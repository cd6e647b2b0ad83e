"""Totals of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineStats:
    """Totals since the last generate() began, or since the engine was made.

    propose_seconds: wall time that propose() calls took from call to return. accepted: draft tokens kept, over
    drafted_for rows of all rounds; a row that runs once more behind its end counts in rounds alone. new_tokens: heard
    of, stop ids included. prefill_tokens: of prompts, and of texts taken up again after one of the preemptions.
    """

    rounds: int = 0
    propose_seconds: float = 0.0
    accepted: int = 0
    drafted_for: int = 0
    new_tokens: int = 0
    prefill_tokens: int = 0
    preemptions: int = 0

    @property
    def mean_accepted(self) -> float:
        """Draft tokens kept per request and round."""
        return self.accepted / max(1, self.drafted_for)

    @property
    def host_us_a_round(self) -> float:
        """Wall time of propose() a round, in microseconds."""
        return 1e6 * self.propose_seconds / max(1, self.rounds)
