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
    had_room_for: int = 0
    """Those of drafted_for whose text had room for a draft token: 2 tokens or more were left of max_tokens."""
    new_tokens: int = 0
    """Tokens that the host has read, stop ids included."""
    prefill_tokens: int = 0
    """Of prompts, and of texts that go on after one of the preemptions."""
    preemptions: int = 0

    @property
    def mean_accepted(self) -> float:
        """Draft tokens kept per request and round, over the rounds that had room for one: accepted / had_room_for.

        A round always adds one token of the target's. Where a text has room for that one alone, no draft token could
        be kept, and the round does not count. One with room for some of the K counts whole, with those it kept.
        """
        return self.accepted / max(1, self.had_room_for)

    @property
    def host_us_a_round(self) -> float:
        """Wall time of propose() a round, in microseconds."""
        return 1e6 * self.propose_seconds / max(1, self.rounds)
