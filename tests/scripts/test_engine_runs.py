"""Timed runs of an engine that is scripted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from scripts import engine_runs, vllm_arm
from scripts.engine_runs import Run, decoding_run, whole_runs


@dataclass
class Scripted:
    """An engine whose requests have these new tokens after each step, which takes a second and verifies for each."""

    steps: Iterator[list[int]]
    seconds: float = 0.0
    rounds: int = 0

    def generate(self, prompts: Sequence[list[int]], new_tokens: int) -> None:
        self.seconds += 2 + self.rounds
        self.rounds += 7

    def submit(self, prompts: Sequence[list[int]], new_tokens: int) -> None: ...

    def step(self) -> list[int]:
        counts = next(self.steps)
        self.seconds += 1
        self.rounds += len(counts)
        return counts


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    counts = [[0, 0], [40, 0], [80, 31], [120, 32], [180, 90], [256, 140], [256, 200], [256, 256]]
    made = Scripted(iter(counts))
    monkeypatch.setattr(engine_runs.time, "perf_counter", lambda: made.seconds)
    return made


def test_decoding_spans_the_steps_in_which_all_decode(engine: Any) -> None:
    run = decoding_run(engine, [[1], [2]], 256)
    assert run == Run(2, 256 + 140 - 120 - 32, 4) and run.speed == (256 + 140 - 120 - 32) / 2
    assert next(engine.steps, None) is None, "the engine is idle again"


def test_whole_runs_begin_after_one_that_compiles(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_arm, "REPEATS", 2)
    assert whole_runs(engine, [[1], [2]], 9) == [Run(9, 18, 7), Run(16, 18, 7)]


def test_kept_leaves_out_tokens_of_prompts_and_of_the_target() -> None:
    assert Run(1.0, 256, 61).kept(1) == pytest.approx(255 / 61 - 1)
    assert Run(1.0, 18, 8).kept(2) == 1.0
    assert Run(1.0, 256, 0).kept(1) == 0.0, "without a draft"
