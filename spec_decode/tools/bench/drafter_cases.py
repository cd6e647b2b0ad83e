"""Rounds of a drafter on triton_paged, every strategy side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from attn_backends.triton_paged import TritonPaged
from builders import AttentionBatch, PagedMetadata, TritonPagedBuilder
from spec_decode.drafter import Strategy
from spec_decode.models import ModelConfig
from spec_decode.tools.bench.rounds import COPIES, STEPS, WHOLE, DrafterCase, RoundConfig, make_model, time_round
from spec_decode.tools.bench.rows import Bench, BenchRow


def _config(hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, vocab: int) -> ModelConfig:
    widths: dict[str, Any] = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": intermediate}
    attention: dict[str, Any] = {"num_q_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    return ModelConfig(num_layers=1, max_positions=2048, **widths, **attention)


_1024 = DrafterCase(
    description="a drafter of hidden size 1024, 32k vocabulary",
    config=_config(1024, 2816, 8, 2, 128, 32000),
    dtype=torch.bfloat16,
    num_reqs=(1, 32),
    num_speculative_tokens=(4, 7),
    context=1024,
)
DRAFTERS = {
    "drafter-1024": _1024,
    "drafter-llama3-8b": replace(
        _1024,
        description="the shape of Llama-3-8B's EAGLE draft: hidden size 4096, 128k vocabulary",
        config=_config(4096, 14336, 32, 8, 128, 128256),
    ),
    "drafter-tiny": DrafterCase(
        description="a drafter small enough for the CPU's emulator",
        config=_config(64, 96, 4, 2, 64, 256),
        dtype=torch.float32,
        num_reqs=(1, 4),
        num_speculative_tokens=(4,),
        context=64,
    ),
}


class RebuiltBuilder(TritonPagedBuilder):
    """The same metadata, rebuilt between steps: overriding build() drops the claim to advance in the graph."""

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> PagedMetadata:
        return super().build(batch, horizon=horizon)


class Rebuilt(TritonPaged):
    """triton_paged as a backend would be that cannot advance in place."""

    name = "triton_paged_rebuilt"
    builder = RebuiltBuilder


def drafter_rows(bench: Bench, name: str) -> Iterator[BenchRow]:
    """Every part of a round, for each strategy and shape of the case."""
    case = DRAFTERS[name]
    model = make_model(case, bench.device)
    names = {part: f"{name}/{part}" for part in (WHOLE, COPIES, STEPS)}
    for k, num_reqs in product(case.num_speculative_tokens, case.num_reqs):
        for backend, strategy in (
            (TritonPaged(), Strategy.FULL_LOOP),
            (TritonPaged(), Strategy.PER_STEP),
            (Rebuilt(), Strategy.PER_STEP),
            (TritonPaged(), Strategy.EAGER),
        ):
            yield from time_round(bench, case.shape(), model, RoundConfig(backend, strategy, k, num_reqs), names)
