"""How often a served vLLM is compared with itself."""

from __future__ import annotations

from collections.abc import Callable

SHARE = 0.01
"""Maximum share of the time: after a comparison, the next one waits for 1 / SHARE times as long as it took. A
comparison first waits for queued device work, which counts too: if the host limits an engine, that time is lost."""


class Pace:
    """Says when it is time to compare again. clock: returns seconds. seconds: of all comparisons so far."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.seconds, self.next = clock, 0.0, -float("inf")

    @property
    def due(self) -> bool:
        return self.clock() >= self.next

    def ended(self, begin: float) -> None:
        """Count the comparison that began at this time of the clock."""
        now = self.clock()
        self.seconds += now - begin
        self.next = now + (now - begin) / SHARE
