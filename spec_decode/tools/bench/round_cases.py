"""Full-loop rounds of every backend that serves the shape, against the limits on host time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from spec_decode.drafter import Strategy
from spec_decode.models import EagleDraft, LatentConfig
from spec_decode.tools.bench.drafter_cases import DRAFTERS
from spec_decode.tools.bench.rounds import STEPS, WHOLE, DrafterCase, RoundConfig, make_model, time_round
from spec_decode.tools.bench.rows import Bench, BenchLimit, BenchRow, serving, with_limits

_SHAPE, _TINY = DRAFTERS["drafter-1024"], replace(DRAFTERS["drafter-tiny"], num_reqs=(1,))


def _latent(case: DrafterCase, heads: int, latent: LatentConfig, *, dim: int, window: int | None) -> DrafterCase:
    config = replace(case.config, num_q_heads=heads, num_kv_heads=1, head_dim=dim, sliding_window=window, latent=latent)
    return replace(case, config=config, page_size=64)


_DENSE = LatentConfig(rope_dim=64, q_rank=512, out_rank=512, value_dim=512, sinks=False)
_SPARSE = _latent(_SHAPE, 64, LatentConfig(rope_dim=64, q_rank=512, out_rank=512), dim=512, window=128)
_CASES = (
    _SHAPE,
    _latent(_SHAPE, 16, _DENSE, dim=576, window=None),
    _SPARSE,
    replace(_SPARSE, kv_dtype=torch.float8_e4m3fn),
)
_CASES_ON_CPU = (
    _TINY,
    _latent(
        _TINY, 4, LatentConfig(rope_dim=16, q_rank=16, out_rank=16, value_dim=64, sinks=False), dim=80, window=None
    ),
    _latent(_TINY, 4, LatentConfig(rope_dim=16, q_rank=16, out_rank=16), dim=64, window=16),
)

_HOST = {WHOLE: BenchLimit("host_us", 80), STEPS: BenchLimit("host_us", 40)}
_TEN_TIMES = BenchLimit("host_ratio", 10, at_least=True)

_Loops = dict[tuple[str, int, int], float]
"""Host time of FlashInfer's full loop by part, K and number of requests."""


def round_rows(bench: Bench) -> Iterator[BenchRow]:
    """The whole round with its inputs in place, and its later steps alone.

    The specification runs no latent draft: it gathers all of a context for every token.
    """
    if not bench.on_cuda:
        bench.miss("round", f"{bench.device.type} has an emulator of graphs: tiny drafts run, and no limit is judged")
    cases = _CASES if bench.on_cuda else _CASES_ON_CPU
    served = list(serving(bench, "round", [case.spec for case in cases]))
    for case in cases:
        model = make_model(case, bench.device)
        backends = [backend for backend, spec in served if spec == case.spec]
        loops: _Loops = {}
        for backend, k, num_reqs in product(backends, case.num_speculative_tokens, case.num_reqs):
            if backend.name != "torch_reference" or case.config.latent is None:
                yield from _loop_rows(bench, case, model, RoundConfig(backend, Strategy.FULL_LOOP, k, num_reqs), loops)
        if case is _SHAPE:
            yield from _host_plan_rows(bench, case, model, loops)


def _loop_rows(
    bench: Bench, case: DrafterCase, model: EagleDraft, run: RoundConfig, loops: _Loops
) -> Iterator[BenchRow]:
    for part, row in _parts(bench, case, model, run):
        if run.backend.name == "flashinfer":
            loops[part, run.num_speculative_tokens, run.num_reqs] = row["host_us"]["p50"]
        yield with_limits(row, _HOST[part]) if bench.on_cuda else row


def _host_plan_rows(bench: Bench, case: DrafterCase, model: EagleDraft, loops: _Loops) -> Iterator[BenchRow]:
    """FlashInfer planned by itself, once a round and at every step; host_ratio: its host time over the loop's."""
    with bench.noting("round/flashinfer, planned on the host"):
        from spec_decode.tools.bench.flashinfer_plans import FlashInferHorizon, FlashInferPerStep

        for k, num_reqs in product(case.num_speculative_tokens, case.num_reqs):
            once = RoundConfig(FlashInferHorizon(), Strategy.FULL_LOOP, k, num_reqs)
            yield from (row for _, row in _parts(bench, case, model, once))
            each = RoundConfig(FlashInferPerStep(), Strategy.PER_STEP, k, num_reqs)
            for part, row in _parts(bench, case, model, each):
                loop = loops.get((part, k, num_reqs))
                row["host_ratio"] = loop and round(row["host_us"]["p50"] / loop, 2)
                yield with_limits(row, _TEN_TIMES) if part == STEPS else row


def _parts(bench: Bench, case: DrafterCase, model: EagleDraft, run: RoundConfig) -> Iterator[tuple[str, BenchRow]]:
    name = f"round/{run.backend.name}"
    names = {WHOLE: "round", STEPS: "round/steps"}
    at = f"[{case.spec.describe()}], K {run.num_speculative_tokens}, {run.num_reqs} requests"
    with bench.noting(name, at=at):
        yield from zip(names, time_round(bench, case.shape(), model, run, names), strict=True)
