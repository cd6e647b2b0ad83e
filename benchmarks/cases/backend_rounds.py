"""Full-loop rounds of every backend that supports the shape, against the limits on host time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from benchmarks.random_drafts import RANDOM_DRAFTS
from benchmarks.rounds import STEPS, WHOLE, RoundConfig, TimedDraft, time_round
from benchmarks.rows import Bench, BenchRow, serving, with_limits
from builders import AttentionSpec
from spec_decode.drafter import Strategy
from spec_decode.models import EagleDraft, LatentConfig, LlamaTarget, ModelConfig
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.decoder_config import read_decoder
from spec_decode.models.layer_windows import no_windows
from spec_decode.tools.timing_limit import TimingLimit


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundCase:
    """The shape of a one-layer draft, its cache, and the rounds to time with it. kv_dtype: None means dtype."""

    config: ModelConfig
    dtype: torch.dtype
    num_reqs: tuple[int, ...]
    num_speculative_tokens: tuple[int, ...]
    context: int
    page_size: int = 16
    kv_dtype: torch.dtype | None = None

    @property
    def spec(self) -> AttentionSpec:
        """The attention of the draft's layer."""
        return replace(self.config.attention_spec(self.page_size, self.dtype), kv_dtype=self.kv_dtype)

    def make(self, device: torch.device) -> TimedDraft:
        """Make the draft with random weights."""
        with torch.device(device):
            target = LlamaTarget(replace(self.config, num_layers=0, latent=None))
            model = EagleDraft(self.config, target)
        for parameter in (*target.parameters(), *model.parameters()):
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(self.dtype)
        return TimedDraft(model=model, spec=self.spec, context=self.context)


def _config(name: str) -> ModelConfig:
    """Return the one-layer config of one of RANDOM_DRAFTS."""
    fields = ConfigReader(RANDOM_DRAFTS[name].config, name)
    return replace(read_decoder(fields, no_windows).model, num_layers=1)


def _latent(case: RoundCase, heads: int, latent: LatentConfig, *, dim: int, window: int | None) -> RoundCase:
    config = replace(case.config, num_q_heads=heads, num_kv_heads=1, head_dim=dim, sliding_window=window, latent=latent)
    return replace(case, config=config, page_size=64)


_SHAPE = RoundCase(
    config=_config("eagle-1024"),
    dtype=torch.bfloat16,
    num_reqs=(1, 32),
    num_speculative_tokens=(4, 7),
    context=1024,
)
_TINY = RoundCase(
    config=_config("drafter-tiny"),
    dtype=torch.float32,
    num_reqs=(1,),
    num_speculative_tokens=(4,),
    context=64,
)
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

_HOST = {WHOLE: TimingLimit("host_us", 80), STEPS: TimingLimit("host_us", 40)}
_TEN_TIMES = TimingLimit("host_ratio", 10, at_least=True)

_Loops = dict[tuple[str, int, int], float]
"""Host time of FlashInfer's full loop by part, K and number of requests."""


def round_rows(bench: Bench) -> Iterator[BenchRow]:
    """Yield the whole round with its inputs in place, and its later steps separately.

    The specification runs no latent draft: it gathers the whole context for every token.
    """
    if not bench.on_cuda:
        bench.miss("round", f"{bench.device.type} emulates graphs: tiny drafts run, and limits are not checked")
    cases = _CASES if bench.on_cuda else _CASES_ON_CPU
    served = list(serving(bench, "round", [case.spec for case in cases]))
    for case in cases:
        draft = case.make(bench.device)
        backends = [backend for backend, spec in served if spec == case.spec]
        loops: _Loops = {}
        for backend, k, num_reqs in product(backends, case.num_speculative_tokens, case.num_reqs):
            if backend.name != "torch_reference" or case.config.latent is None:
                yield from _loop_rows(bench, draft, RoundConfig(backend, Strategy.FULL_LOOP, k, num_reqs), loops)
        if case is _SHAPE:
            yield from _host_plan_rows(bench, case, draft, loops)


def _loop_rows(bench: Bench, draft: TimedDraft, run: RoundConfig, loops: _Loops) -> Iterator[BenchRow]:
    for part, row in _parts(bench, draft, run):
        if run.backend.name == "flashinfer":
            loops[part, run.num_speculative_tokens, run.num_reqs] = row["host_us"]["p50"]
        yield with_limits(row, _HOST[part]) if bench.on_cuda else row


def _host_plan_rows(bench: Bench, case: RoundCase, draft: TimedDraft, loops: _Loops) -> Iterator[BenchRow]:
    """Yield FlashInfer's own plan, made once per round and in every step; host_ratio: host time over the loop's."""
    with bench.noting("round/flashinfer, planned on the host"):
        from benchmarks.flashinfer_plans import FlashInferHorizon, FlashInferPerStep

        for k, num_reqs in product(case.num_speculative_tokens, case.num_reqs):
            once = RoundConfig(FlashInferHorizon(), Strategy.FULL_LOOP, k, num_reqs)
            yield from (row for _, row in _parts(bench, draft, once))
            each = RoundConfig(FlashInferPerStep(), Strategy.PER_STEP, k, num_reqs)
            for part, row in _parts(bench, draft, each):
                loop = loops.get((part, k, num_reqs))
                row["host_ratio"] = loop and round(row["host_us"]["p50"] / loop, 2)
                yield with_limits(row, _TEN_TIMES) if part == STEPS else row


def _parts(bench: Bench, draft: TimedDraft, run: RoundConfig) -> Iterator[tuple[str, BenchRow]]:
    name = f"round/{run.backend.name}"
    names = {WHOLE: "round", STEPS: "round/steps"}
    at = f"[{draft.spec.describe()}], K {run.num_speculative_tokens}, {run.num_reqs} requests"
    with bench.noting(name, at=at):
        yield from zip(names, time_round(bench, draft, run, names), strict=True)
