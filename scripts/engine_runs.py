"""Runs of an engine, timed: whole requests, and the part in which all of them decode."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from scripts import vllm_arm

WARM_UP = 32
"""New tokens of every request before decoding alone is timed, as in `bench throughput`."""


class Engine(Protocol):
    """What is measured of an engine."""

    about: dict[str, Any]
    """What the report says of it."""

    @property
    def rounds(self) -> int:
        """How often it has verified a request's drafts so far."""

    def generate(self, prompts: Sequence[list[int]], new_tokens: int) -> None:
        """Continue all prompts, each by so many tokens."""

    def submit(self, prompts: Sequence[list[int]], new_tokens: int) -> None:
        """Queue prompts for `step`."""

    def step(self) -> list[int]:
        """Run one step, and return how many new tokens each request has so far."""


class Run(NamedTuple):
    """A timed run.

    tokens  new ones
    rounds  verifications of a request's drafts, in which they came; 0 without drafts
    """

    seconds: float
    tokens: int
    rounds: int

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def kept(self, of_prompts: int) -> float:
        """Return the mean number of drafts that a round kept. of_prompts: tokens that came from a prompt, in no round.
        0 without drafts."""
        return (self.tokens - of_prompts) / self.rounds - 1 if self.rounds else 0.0


def speeds(runs: Sequence[Run]) -> list[float]:
    """Return the tokens per second of each run, as reports have them."""
    return [round(run.speed, 1) for run in runs]


def whole_runs(engine: Engine, prompts: Sequence[list[int]], new_tokens: int) -> list[Run]:
    """Run whole requests several times, after a run in which anything compiled on first use is compiled."""
    engine.generate(prompts, new_tokens)
    runs = []
    for _ in range(vllm_arm.REPEATS):
        before, start = engine.rounds, time.perf_counter()
        engine.generate(prompts, new_tokens)
        seconds = time.perf_counter() - start
        runs.append(Run(seconds, len(prompts) * new_tokens, engine.rounds - before))
    return runs


def decoding_run(engine: Engine, prompts: Sequence[list[int]], new_tokens: int) -> Run:
    """Run whole requests, and return the part in which all decode: from when each has WARM_UP new tokens until the
    first is done."""
    engine.submit(prompts, new_tokens)
    counts = engine.step()
    while min(counts) < min(WARM_UP, new_tokens):
        counts = engine.step()
    tokens, rounds, start = sum(counts), engine.rounds, time.perf_counter()
    while max(counts) < new_tokens:
        counts = engine.step()
    run = Run(time.perf_counter() - start, sum(counts) - tokens, engine.rounds - rounds)
    while min(counts) < new_tokens:
        counts = engine.step()
    return run
