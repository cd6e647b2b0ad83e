"""Family soak: thousands of rounds while requests join, leave and reach their limit. Runs only on request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from spec_decode.conformance.check import Family
from spec_decode.conformance.coverage import column
from spec_decode.conformance.draft_runs import without_interpreter
from spec_decode.drafter import Strategy
from spec_decode.testing.outcome import Measurements
from spec_decode.testing.subject import Subject

ROUNDS = 5_000


@dataclass(frozen=True, slots=True)
class SoakCase:
    """A number of rounds in a strategy, drawn from a seed."""

    strategy: Strategy
    rounds: int
    seed: int

    @property
    def name(self) -> str:
        return f"r{self.rounds}-s{self.seed}-{self.strategy.value}"


_length: ContextVar[tuple[int, int]] = ContextVar("length", default=(ROUNDS, 0))


@contextmanager
def soak_length(rounds: int = ROUNDS, seed: int = 0) -> Iterator[None]:
    """Within this context, soaks are planned with this many rounds per strategy, at least 10, and this seed."""
    token = _length.set((rounds, seed))
    try:
        yield
    finally:
        _length.reset(token)


def _cases(subject: Subject) -> list[tuple[str, SoakCase]]:
    return [(case.name, case) for case in (SoakCase(strategy, *_length.get()) for strategy in Strategy)]


check = Family("soak", covers=lambda subject, case: [column("strategy", case.strategy)])


@check(
    "while requests join, leave and reach limits, one round in ten equals eager bit for bit, and memory stays flat",
    _cases,
)
@without_interpreter
def long_runs_stay_right(subject: Subject, case: SoakCase) -> Measurements:
    from spec_decode.conformance.soak import soak  # no other check needs it, and this one runs only on request

    return soak(subject, case.strategy, case.rounds, case.seed)
