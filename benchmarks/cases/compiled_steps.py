"""Later steps of drafts beside the same steps compiled by torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from attn_backends import get
from benchmarks.compiled_step import CompiledStep
from benchmarks.measure import CallTimes, time_call
from benchmarks.random_drafts import PUBLISHED_DRAFTS
from benchmarks.rounds import STEPS, RoundConfig, TimedDraft, time_round
from benchmarks.rows import Bench, BenchRow, with_limits
from spec_decode.drafter import Strategy
from spec_decode.tools.timing_limit import TimingLimit

CASE = "compiled-steps"
_NUM_SPECULATIVE_TOKENS = 7
_NO_SLOWER = TimingLimit("peer_ratio", 1.0)


def compiled_step_rows(bench: Bench) -> Iterator[BenchRow]:
    """For every draft and number of requests a row of ours, with its time over the compiled one's, and one of that."""
    for name, case in PUBLISHED_DRAFTS.items():
        with bench.noting(f"{CASE}: {name}"):
            draft = TimedDraft.of(case, bench.device)
            for num_reqs in case.num_reqs:
                run = RoundConfig(get(case.backends[0]), Strategy.FULL_LOOP, _NUM_SPECULATIVE_TOKENS, num_reqs)
                with bench.noting(f"{CASE}: {name}", at=f"{num_reqs} requests"):
                    yield from beside_compiled(bench, f"{name}/{CASE}", draft, run)


def beside_compiled(bench: Bench, case: str, draft: TimedDraft, run: RoundConfig) -> Iterator[BenchRow]:
    """The two rows of a draft and of how its rounds are run."""
    (ours,) = time_round(bench, draft, run, {STEPS: case})
    step = CompiledStep(draft, run.num_reqs, bench.device)

    def steps() -> None:
        for _ in range(run.num_speculative_tokens - 1):
            step()

    theirs = _peer(ours, time_call(steps, bench.device))
    yield with_limits({**ours, "peer_ratio": round(_p50(ours) / _p50(theirs), 3)}, _NO_SLOWER)
    yield theirs


def _p50(row: BenchRow) -> float:
    return float((row["gpu_us"] or row["wall_us"])["p50"])


def _peer(ours: BenchRow, times: CallTimes) -> BenchRow:
    """The compiled step's row: of the same shape as ours."""
    same = ("case", "spec", "num_reqs", "context", "num_speculative_tokens", "floor_us", "floor_counts")
    row = {"backend": "torch.compile", "peer": True, "strategy": Strategy.PER_STEP.value, **asdict(times)}
    return {**{name: ours[name] for name in same}, **row}
