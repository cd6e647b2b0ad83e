"""Output throughput of the whole engine: Llama-3-8B's shape with its EAGLE draft, random weights, set acceptance.

The target is loaded from a folder in the published layout, as `LLM` loads it, and each row says what that took. All
requests of a row are submitted at once, and rates are measured while every one of them decodes: from when each has
`warm_up_tokens` tokens, so that prefill and first launches are over, until the first has its full `output`. The output
of random weights is arbitrary, so nothing stops a text early, and synthetic acceptance sets how many drafts are kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch

from attn_backends import Accepted, AttentionBackend, registry
from benchmarks.measure import Quantiles, quantiles
from benchmarks.random_drafts import BLOCK_DRAFTS, RANDOM_DRAFTS, RandomDraft
from benchmarks.random_model import load_random_target
from benchmarks.rows import Bench, BenchRow, with_limits
from spec_decode.drafter import DrafterConfig, Strategy
from spec_decode.engine import Engine, EngineConfig, EngineStats, Request
from spec_decode.matrix.sources import Load
from spec_decode.model_api import DraftModel
from spec_decode.models.checkpoints.store import RandomStore
from spec_decode.models.decoder import DecoderTarget
from spec_decode.models.layer_windows import ARCHITECTURES
from spec_decode.sampling import SamplingParams
from spec_decode.tools.timing_limit import TimingLimit
from spec_decode.trees import DynamicTreeConfig

NAME = "throughput"
_SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "rms_norm_eps", "rope_theta",
)  # fmt: skip
"""Fields that a target has from its draft."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """How an engine decodes. accepted: mean draft tokens kept per round; None: the target decides.
    num_speculative_tokens 0: no speculation. tree: replaces the chain; the target decides what is kept of it.
    one_graph: as in EngineConfig."""

    num_speculative_tokens: int
    accepted: float | None = 0.0
    tree: DynamicTreeConfig | None = None
    step_0_in_graph: bool = True
    one_graph: bool | None = None
    batch_invariant: bool = False


_STEP_0_ON = Decoding(num_speculative_tokens=2, accepted=1.0, one_graph=False)
_STEP_0_OFF = replace(_STEP_0_ON, step_0_in_graph=False)
"""SGLang #6606 drafts 2 tokens per round, the first by step 0, and states no acceptance: half of them here. The number
cancels out of the gain, a ratio of round times."""
_PLAIN = Decoding(num_speculative_tokens=0)
_SPECULATIVE = Decoding(num_speculative_tokens=4, accepted=2.5)
_TWO_GRAPHS, _ONE_GRAPH = replace(_SPECULATIVE, one_graph=False), replace(_SPECULATIVE, one_graph=True)
_INVARIANT = replace(_SPECULATIVE, batch_invariant=True)


class Models(NamedTuple):
    """A target and its draft, and what loading the target took, if that is known."""

    target: DecoderTarget
    draft: DraftModel
    load: Load | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputCase:
    """A draft over a complete target of its shape, and the requests to time.

    architecture: the target's, as in its config.json. backends: the target's, in order of preference; the last is used
    if no other supports it. prompt, output: tokens per request. warm_up_tokens: output tokens before the clock starts.
    gains: minimum gain in percent from the graph of step 0, by requests. kept: mean draft tokens kept per round, by the
    number drafted.
    """

    draft: RandomDraft
    num_layers: int
    architecture: str = "LlamaForCausalLM"
    dtype: torch.dtype
    backends: tuple[str, ...]
    num_reqs: tuple[int, ...]
    prompt: int
    output: int
    warm_up_tokens: int
    gains: Mapping[int, float] = field(default_factory=dict)
    kept: Mapping[int, float] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """The target's config.json: the draft's sizes, and layers of its own."""
        sizes = {name: self.draft.config[name] for name in _SHARED}
        named = {"architectures": [self.architecture], "model_type": ARCHITECTURES[self.architecture]}
        return {**sizes, **named, "num_hidden_layers": self.num_layers}

    def models(self, device: torch.device) -> Models:
        """Load both on the device: the target from a folder, as `LLM` does, and the draft by its loader."""
        store = RandomStore(self.draft.config, list(self.draft.names), device)
        read = getattr(self.draft.kind, "aux_hidden_state_layers", None)
        states = read and read(store, self.num_layers)
        target, load = load_random_target(self.config, states, self.dtype, device)
        return Models(target, self.draft.kind.load(store, target, dtype=self.dtype, device=device), load)

    def requests(self, count: int) -> list[Request]:
        """Return greedy prompts of random tokens, with a seed each: requests of one seed would keep the same drafts."""
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(0, self.draft.config["vocab_size"], (count, self.prompt), generator=generator).tolist()
        return [
            Request(prompt=p, sampling=SamplingParams(max_tokens=self.output, seed=seed))
            for seed, p in enumerate(prompts)
        ]


LLAMA3_8B = ThroughputCase(
    draft=RANDOM_DRAFTS["llama3-8b-eagle"],
    num_layers=32,
    dtype=torch.bfloat16,
    backends=("flash_attn3", "triton_paged"),
    num_reqs=(1, 4, 16, 32),
    prompt=1000,
    output=256,
    warm_up_tokens=32,
    gains={1: 4.9, 4: 4.2, 16: 6.2, 32: 3.7},
)
"""The output is a quarter of the published runs' 1000 tokens: all rounds are alike, and GPU time is scarce."""
QWEN3_8B = replace(
    LLAMA3_8B,
    draft=BLOCK_DRAFTS["qwen3-8b-dflash"],
    num_layers=36,
    architecture="Qwen3ForCausalLM",
    gains={},
    kept={3: 2.0, 7: 3.5, 15: 5.0},
)


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured while all requests decoded. round_us: from one engine step to the next; launch_us: the host time in it
    for launching draft and target."""

    tokens: int
    seconds: float
    accepted: float
    round_us: Quantiles
    launch_us: float

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together."""
        return self.tokens / self.seconds


def throughput_rows(bench: Bench, case: ThroughputCase = LLAMA3_8B) -> Iterator[BenchRow]:
    """Yield comparisons: the graph of step 0 on and off, one graph per round and two, speculation and plain decoding,
    batch invariance on and off."""
    with bench.noting(NAME):
        timed = timed_pair(bench, case)
        # A backend that supports both.
        everywhere = replace(timed, backend=registry.get(case.backends[-1]))
        for what, rows in (
            ("extend-graph", gain_rows("extend-graph", timed, _STEP_0_OFF, _STEP_0_ON, case.gains)),
            ("one-graph", gain_rows("one-graph", timed, _TWO_GRAPHS, _ONE_GRAPH, {})),
            ("speculation", compared_rows("speculation", (timed, _PLAIN), (timed, _SPECULATIVE), "plain_ratio")),
            (
                "batch-invariant",
                compared_rows("batch-invariant", (everywhere, _SPECULATIVE), (everywhere, _INVARIANT), "free_ratio"),
            ),
        ):
            with bench.noting(f"{NAME}/{what}"):
                yield from rows


def block_throughput_rows(
    bench: Bench, case: ThroughputCase = QWEN3_8B, steps: RandomDraft = RANDOM_DRAFTS["qwen3-8b-eagle3"]
) -> Iterator[BenchRow]:
    """Yield, for each number of draft tokens, a step-by-step draft of the same target, then the case's block draft,
    with its output tokens per second over the other's as step_ratio."""
    part = "block-drafts"
    with bench.noting(f"{NAME}/{part}"):
        chain, block = timed_pair(bench, replace(case, draft=steps)), timed_pair(bench, case)
        for count, kept in case.kept.items():
            decoding = Decoding(num_speculative_tokens=count, accepted=kept)
            for row in compared_rows(part, (chain, decoding), (block, decoding), "step_ratio"):
                yield {**row, "peer": "step_ratio" not in row}


@dataclass(frozen=True, slots=True)
class TimedPair:
    """A case with its models, and the backend chosen for the target."""

    case: ThroughputCase
    models: Models
    backend: AttentionBackend

    def engine(self, decoding: Decoding) -> Engine:
        """Make an engine for the case's largest batch: its graphs also serve smaller ones."""
        case, plain = self.case, decoding.num_speculative_tokens == 0
        drafter = None
        if not plain:
            drafter = DrafterConfig(
                num_speculative_tokens=decoding.num_speculative_tokens,
                strategy=Strategy.FULL_LOOP,
                step_0_in_graph=decoding.step_0_in_graph,
                tree=decoding.tree,
            )
        config = EngineConfig(
            drafter=drafter,
            max_num_seqs=max(case.num_reqs),
            max_model_len=case.prompt + case.output,
            page_size=case.draft.page_size,
            verification=None if decoding.accepted is None else f"synthetic:{decoding.accepted}",
            one_graph=decoding.one_graph,
            batch_invariant=decoding.batch_invariant,
        )
        draft_backend = registry.get(case.draft.backends[0])
        draft = None if plain else self.models.draft
        return Engine(self.models.target, draft, self.backend, config, draft_backend=draft_backend)

    def row(self, part: str, decoding: Decoding, num_reqs: int, host_waits: bool, rates: Rates) -> BenchRow:
        """Return a row; per_user is tokens per second of one request."""
        case, plain = self.case, decoding.num_speculative_tokens == 0
        (group,) = self.models.target.layer_groups(case.draft.page_size)
        return {
            "case": f"{NAME}/{part}",
            "backend": self.backend.name,
            "draft": None if plain else case.draft.name,
            "draft_backend": None if plain else case.draft.backends[0],
            "spec": group.spec.describe(),
            "strategy": None if plain else Strategy.FULL_LOOP.value,
            "num_reqs": num_reqs,
            "num_speculative_tokens": decoding.num_speculative_tokens,
            "context": case.prompt,
            "output_tokens": case.output,
            "timed_tokens": rates.tokens,
            "extend_in_graph": None if plain else decoding.step_0_in_graph,
            "one_graph": None if plain else decoding.one_graph,
            "batch_invariant": decoding.batch_invariant,
            "host_waits": host_waits,
            "accepted": None if plain else round(rates.accepted, 3),
            "wall_us": rates.round_us,
            "launch_us": round(rates.launch_us, 1),
            "tokens_per_second": round(rates.tokens_per_second, 2),
            "per_user": round(rates.tokens_per_second / num_reqs, 2),
            "load": self.models.load,
        }


def gain_rows(
    part: str, timed: TimedPair, without: Decoding, within: Decoding, gains: Mapping[int, float]
) -> Iterator[BenchRow]:
    """Yield two ways to launch the same rounds, the second with its gain in percent; gains: its minimum, by requests.

    The engine's host runs a round ahead of the device, or waits for every round: the published gains are for an engine
    with a waiting host, and host work done ahead costs no time.
    """
    case, engines = timed.case, [timed.engine(decoding) for decoding in (without, within)]
    for num_reqs, host_waits in product(case.num_reqs, (False, True)):
        requests = case.requests(num_reqs)
        before, after = (rates_of(engine, requests, case.warm_up_tokens, host_waits) for engine in engines)
        yield timed.row(part, without, num_reqs, host_waits, before)
        gain = 100 * (after.tokens_per_second / before.tokens_per_second - 1)
        row = timed.row(part, within, num_reqs, host_waits, after)
        limits = [TimingLimit("gain_percent", gains[num_reqs], at_least=True)] if num_reqs in gains else []
        yield with_limits({**row, "gain_percent": round(gain, 2)}, *limits)


def compared_rows(
    part: str, without: tuple[TimedPair, Decoding], within: tuple[TimedPair, Decoding], ratio: str
) -> Iterator[BenchRow]:
    """Yield two ways to decode the same requests; the second row has its rate over the first's, named `ratio`."""
    case, engines = without[0].case, [timed.engine(decoding) for timed, decoding in (without, within)]
    for num_reqs in case.num_reqs:
        requests = case.requests(num_reqs)
        before, after = (rates_of(engine, requests, case.warm_up_tokens, False) for engine in engines)
        yield without[0].row(part, without[1], num_reqs, False, before)
        over = round(after.tokens_per_second / before.tokens_per_second, 3)
        yield {**within[0].row(part, within[1], num_reqs, False, after), ratio: over}


def rates_of(engine: Engine, requests: Sequence[Request], warm_up_tokens: int, host_waits: bool) -> Rates:
    """Return rates of concurrent requests in an engine without others; it has none of these afterwards either.

    warm_up_tokens: tokens each must have before the clock starts; fewer than any request's. host_waits: for the device,
    after every step.
    """
    device = next(engine.target.model.parameters()).device

    def step() -> None:
        engine.step()
        if host_waits and device.type == "cuda":
            torch.cuda.synchronize(device)

    handles = [engine.submit(request) for request in requests]
    while any(len(handle.generation.token_ids) < warm_up_tokens for handle in handles):
        step()
    engine.stats = EngineStats()
    times = [time.perf_counter()]
    while not any(handle.done for handle in handles):
        step()
        times.append(time.perf_counter())
    stats, round_us = engine.stats, quantiles([1e6 * (end - start) for start, end in pairwise(times)])
    rates = Rates(stats.new_tokens, times[-1] - times[0], stats.mean_accepted, round_us, stats.host_us_a_round)
    for handle in handles:
        engine.cancel(handle)
    while engine.step():
        pass
    return rates


def timed_pair(bench: Bench, case: ThroughputCase) -> TimedPair:
    """Return the case's models on the bench's device, with the first of its backends that supports the target there."""
    models = case.models(bench.device)
    return TimedPair(case, models, _backend(bench, case, models.target))


def _backend(bench: Bench, case: ThroughputCase, target: DecoderTarget) -> AttentionBackend:
    """Return the first of the case's backends that supports the target here, noting why earlier ones do not."""
    (group,) = target.layer_groups(case.draft.page_size)
    *preferred, last = case.backends
    for name in preferred:
        verdict = registry.explain(name, group.spec, bench.device)
        if isinstance(verdict, Accepted):
            return registry.get(name)
        bench.miss(f"{NAME}/{name}", "; ".join(verdict.reasons))
    return registry.get(last)
