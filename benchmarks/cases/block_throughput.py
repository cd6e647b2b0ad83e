"""Output throughput of a whole engine whose draft proposes a block at once, beside one that goes step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from benchmarks.cases.throughput import (
    LLAMA3_8B,
    NAME,
    Decoding,
    ThroughputCase,
    compared_rows,
    timed_pair,
)
from benchmarks.random_drafts import BLOCK_DRAFTS, RANDOM_DRAFTS
from benchmarks.rows import Bench, BenchRow

_PART = "block-drafts"


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockThroughputCase:
    """Two drafts of one target: `block` and `steps` differ in the draft alone.

    kept: draft tokens that a round keeps of either in the mean, by the number that it drafts.
    """

    block: ThroughputCase
    steps: ThroughputCase
    kept: Mapping[int, float]


_DFLASH = replace(LLAMA3_8B, draft=BLOCK_DRAFTS["qwen3-8b-dflash"], num_layers=36, gains={})
QWEN3_8B = BlockThroughputCase(
    block=_DFLASH, steps=replace(_DFLASH, draft=RANDOM_DRAFTS["qwen3-8b-eagle3"]), kept={3: 2.0, 7: 3.5, 15: 5.0}
)


def block_throughput_rows(bench: Bench, case: BlockThroughputCase = QWEN3_8B) -> Iterator[BenchRow]:
    """For each number of draft tokens the draft that goes step by step, then the block; step_ratio: its output tokens a
    second over those of the other."""
    with bench.noting(f"{NAME}/{_PART}"):
        steps, block = timed_pair(bench, case.steps), timed_pair(bench, case.block)
        for count, kept in case.kept.items():
            decoding = Decoding(num_speculative_tokens=count, accepted=kept)
            for row in compared_rows(_PART, (steps, decoding), (block, decoding), "step_ratio"):
                yield {**row, "peer": "step_ratio" not in row}
