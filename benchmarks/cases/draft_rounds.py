"""Rounds of drafts in published shapes: all strategies, and block drafts next to another draft of the same target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from attn_backends import get
from attn_backends.triton_paged import TritonPaged
from benchmarks.random_drafts import BLOCK_DRAFTS, RANDOM_DRAFTS, RandomDraft
from benchmarks.rounds import STEPS, WHOLE, RoundConfig, TimedDraft, make_drafter, time_round
from benchmarks.rows import Bench, BenchRow, with_limits
from builders import AttentionBatch, PagedMetadata, TritonPagedBuilder
from spec_decode.drafter import Strategy
from spec_decode.tools.timing_limit import TimingLimit

_FLOOR = {("llama3-8b-eagle", 1): TimingLimit("floor_ratio", 1.12), ("eagle-1024", 1): TimingLimit("floor_ratio", 2.0)}
"""Maximum ratio of a round to the time to move its bytes once, by draft and number of requests."""
_IN_8_BITS = ("llama3-8b-eagle", "eagle-1024")
"""Drafts that are also timed with 8-bit weights, against the floor of 16 bits."""
_FLOOR_IN_8_BITS = {("llama3-8b-eagle", 1): TimingLimit("floor_ratio", 0.75)}
_BLOCK_FLOOR = {1: TimingLimit("floor_ratio", 1.12), 32: TimingLimit("floor_ratio", 1.3)}
"""Maximum ratio to its floor of a block draft's round that draws all tokens at once, by number of requests."""
_LOOP = TimingLimit("loop_us", 4)
"""Maximum GPU time of a device-loop step beyond one of the full loop."""
_BLOCK_HOST = TimingLimit("host_us", 40)
_COMPARED_WITH = {
    "llama3-8b-peagle": "llama3-8b-eagle",
    "gpt-oss-20b-peagle": "gpt-oss-20b-eagle3",
    "qwen3-8b-dflash": "qwen3-8b-eagle3",
    "qwen3-8b-dflash2": "qwen3-8b-dflash",
}
"""The draft that a block draft is compared with: a step-by-step one, or the one it extends."""
_IN_TURN = ("qwen3-8b-dflash2",)
"""Block drafts that draw their tokens one after another: this moves no bytes, so they have no limit."""


class RebuiltBuilder(TritonPagedBuilder):
    """The same metadata, rebuilt between steps: overriding build() drops the claim to advance in the graph."""

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> PagedMetadata:
        return super().build(batch, horizon=horizon)


class Rebuilt(TritonPaged):
    """triton_paged as if it could not advance in place."""

    name = "triton_paged_rebuilt"
    builder = RebuiltBuilder


def random_draft_rows(bench: Bench, name: str) -> Iterator[BenchRow]:
    """Yield rows of one of RANDOM_DRAFTS."""
    case = RANDOM_DRAFTS[name]
    with bench.noting(name):
        draft = TimedDraft.of(case, bench.device)
        with bench.noting(name, at="graphs for K 1 to 8"):
            yield from _graph_set_rows(bench, name, draft)
        unrolled: dict[tuple[int, int], float] = {}
        for run, parts in _rounds(case):
            names = {part: f"{name}/{part}" for part in parts}
            at = f"{run.backend.name}, {run.strategy.value}, K {run.num_speculative_tokens}, {run.num_reqs} requests"
            with bench.noting(name, at=at):
                for row in time_round(bench, draft, run, names):
                    yield _with_limits(name, run, row, unrolled)
    if name in _IN_8_BITS:
        with bench.noting(f"{name}, fp8"):
            yield from _rows_in_8_bits(bench, name)


def _rows_in_8_bits(bench: Bench, name: str) -> Iterator[BenchRow]:
    """Yield full-loop rounds of a draft with draft_weights="fp8"."""
    case = replace(RANDOM_DRAFTS[name], draft_weights="fp8", dtype=torch.bfloat16)
    draft, backend = TimedDraft.of(case, bench.device), get(case.backends[0])
    for k, num_reqs in product(case.num_speculative_tokens, case.num_reqs):
        with bench.noting(name, at=f"fp8, K {k}, {num_reqs} requests"):
            run = RoundConfig(backend, Strategy.FULL_LOOP, k, num_reqs)
            for row in time_round(bench, draft, run, {WHOLE: f"{name}/fp8-round"}):
                limit = _FLOOR_IN_8_BITS.get((name, num_reqs))
                yield with_limits(row, limit) if limit else row


def _with_limits(name: str, run: RoundConfig, row: BenchRow, unrolled: dict[tuple[int, int], float]) -> BenchRow:
    """Return the row with the limits for its size and strategy. unrolled: GPU time of full loops' later steps."""
    limit = _FLOOR.get((name, run.num_reqs))
    if limit and run.strategy is Strategy.FULL_LOOP and row["case"].endswith(WHOLE):
        return with_limits(row, limit)
    shape, gpu_us = (run.num_speculative_tokens, run.num_reqs), row["gpu_us"]
    if gpu_us is None or not row["case"].endswith(STEPS):
        return row
    if run.strategy is Strategy.FULL_LOOP:
        unrolled[shape] = gpu_us["p50"]
    elif run.strategy is Strategy.DEVICE_LOOP and shape in unrolled:
        row["loop_us"] = round((gpu_us["p50"] - unrolled[shape]) / (run.num_speculative_tokens - 1), 2)
        return with_limits(row, _LOOP)
    return row


def _graph_set_rows(bench: Bench, name: str, draft: TimedDraft) -> Iterator[BenchRow]:
    """Yield the cost of serving every K from 1 to 8: a full loop captured for each, or one device loop for all.

    Includes the graphs of step 0, whose memory the loops reuse.
    """
    backend, taken = get(RANDOM_DRAFTS[name].backends[0]), {}
    # The first loop of a process compiles the kernel that sets its condition.
    make_drafter(draft, RoundConfig(backend, Strategy.DEVICE_LOOP, 2, 1), bench.device).capture()
    for strategy, counts in ((Strategy.FULL_LOOP, range(2, 9)), (Strategy.DEVICE_LOOP, (8,))):
        graphs = []
        for k in counts:
            drafter = make_drafter(draft, RoundConfig(backend, strategy, k, 1), bench.device)
            drafter.capture()
            graphs += drafter.graphs.reports
        taken[strategy] = sum(graph.seconds for graph in graphs), sum(graph.bytes for graph in graphs)
        seconds, num_bytes = taken[strategy]
        row = {
            **draft.labels(f"{name}/graphs for K 1 to 8", RoundConfig(backend, strategy, k, 1)),
            "capture_seconds": round(seconds, 4),
            "graph_bytes": num_bytes,
        }
        if strategy is Strategy.DEVICE_LOOP:
            unrolled_seconds, unrolled_bytes = taken[Strategy.FULL_LOOP]
            row["capture_ratio"] = round(seconds / unrolled_seconds, 3)
            row["bytes_ratio"] = round(num_bytes / unrolled_bytes, 3) if unrolled_bytes else None
            row = with_limits(row, TimingLimit("capture_ratio", 0.334), TimingLimit("bytes_ratio", 0.334))
        yield row


def _rounds(case: RandomDraft) -> Iterator[tuple[RoundConfig, tuple[str, ...]]]:
    """Yield the rounds, each with the parts to time."""
    first, *others = [get(name) for name in case.backends]
    for k, num_reqs in product(case.num_speculative_tokens, case.num_reqs):
        for strategy in (Strategy.FULL_LOOP, Strategy.DEVICE_LOOP):
            yield RoundConfig(first, strategy, k, num_reqs), (WHOLE, STEPS)
        yield RoundConfig(first, Strategy.FULL_LOOP, k, num_reqs, 1.0), (WHOLE,)
    for num_reqs in dict.fromkeys((case.num_reqs[0], case.num_reqs[-1])):
        ways = [(first, Strategy.PER_STEP), (first, Strategy.EAGER)]
        ways += [(Rebuilt(), Strategy.PER_STEP)] if first.name == "triton_paged" else []
        for backend, strategy in (*ways, *((other, Strategy.FULL_LOOP) for other in others)):
            yield RoundConfig(backend, strategy, case.num_speculative_tokens[-1], num_reqs), (WHOLE,)


def block_draft_rows(bench: Bench, name: str) -> Iterator[BenchRow]:
    """Yield rows of one of BLOCK_DRAFTS and of its comparison draft at the same K and requests, with the latter's
    round time over the block draft's as step_ratio."""
    block, other = BLOCK_DRAFTS[name], (RANDOM_DRAFTS | BLOCK_DRAFTS)[_COMPARED_WITH[name]]
    block_us: dict[tuple[int, int], float] = {}
    for row in _block_rounds(bench, name, block, block):
        if row["gpu_us"] is not None:
            block_us.setdefault((row["num_speculative_tokens"], row["num_reqs"]), row["gpu_us"]["p50"])
        floor = None if name in _IN_TURN else _BLOCK_FLOOR.get(row["num_reqs"])
        yield with_limits(row, *([floor] if floor else []), _BLOCK_HOST) if bench.on_cuda else row
    for row in _block_rounds(bench, f"{name}/{_COMPARED_WITH[name]}", other, block):
        own = block_us.get((row["num_speculative_tokens"], row["num_reqs"]))
        yield {**row, "peer": True, "step_ratio": own and round(row["gpu_us"]["p50"] / own, 3)}


def _block_rounds(bench: Bench, name: str, case: RandomDraft, sizes: RandomDraft) -> Iterator[BenchRow]:
    """Yield rounds of a case in one graph on its first backend; the largest K and batch on the others too."""
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
