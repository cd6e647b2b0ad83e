"""Rounds of drafts that propose a block at once, beside a draft of the same target that goes step by step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from attn_backends import get
from benchmarks.random_drafts import BLOCK_DRAFTS, RANDOM_DRAFTS, RandomDraft
from benchmarks.rounds import WHOLE, RoundConfig, TimedDraft, time_round
from benchmarks.rows import Bench, BenchRow, with_limits
from spec_decode.drafter import Strategy
from spec_decode.tools.timing_limit import TimingLimit

_FLOOR = {1: TimingLimit("floor_ratio", 1.12), 32: TimingLimit("floor_ratio", 1.3)}
"""What a round may take of the time to move its bytes once, by the number of requests."""
_HOST = TimingLimit("host_us", 40)
_BESIDE = {
    "llama3-8b-peagle": "llama3-8b-eagle",
    "gpt-oss-20b-peagle": "gpt-oss-20b-eagle3",
    "qwen3-8b-dflash": "qwen3-8b-eagle3",
}
"""The draft that goes step by step, by the one that does not."""


def block_draft_rows(bench: Bench, name: str) -> Iterator[BenchRow]:
    """Rows of one of BLOCK_DRAFTS, and of the draft beside it over the same K and requests; step_ratio: the time of its
    round over that of the block's."""
    block, chain = BLOCK_DRAFTS[name], RANDOM_DRAFTS[_BESIDE[name]]
    block_us: dict[tuple[int, int], float] = {}
    for row in _rounds(bench, name, block, block):
        if row["gpu_us"] is not None:
            block_us.setdefault((row["num_speculative_tokens"], row["num_reqs"]), row["gpu_us"]["p50"])
        floor = _FLOOR.get(row["num_reqs"])
        yield with_limits(row, *([floor] if floor else []), _HOST) if bench.on_cuda else row
    for row in _rounds(bench, f"{name}/{_BESIDE[name]}", chain, block):
        its = block_us.get((row["num_speculative_tokens"], row["num_reqs"]))
        yield {**row, "peer": True, "step_ratio": its and round(row["gpu_us"]["p50"] / its, 3)}


def _rounds(bench: Bench, name: str, case: RandomDraft, sizes: RandomDraft) -> Iterator[BenchRow]:
    """Rounds of a case in one graph, by its first backend, and of the largest K and batch by the others too."""
    with bench.noting(name):
        draft = TimedDraft.of(case, bench.device)
        first, *others = map(get, case.backends)
        runs = [(first, k, n) for k, n in product(sizes.num_speculative_tokens, sizes.num_reqs)]
        runs += [(other, sizes.num_speculative_tokens[-1], sizes.num_reqs[-1]) for other in others]
        for backend, k, num_reqs in runs:
            with bench.noting(name, at=f"{backend.name}, K {k}, {num_reqs} requests"):
                yield from time_round(
                    bench, draft, RoundConfig(backend, Strategy.FULL_LOOP, k, num_reqs), {WHOLE: f"{name}/round"}
                )
