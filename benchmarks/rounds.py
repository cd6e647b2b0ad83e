"""Time a drafter's round, whole and in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

import torch

from attn_backends import AttentionBackend, get
from attn_backends.kernels.linear.fp8_weight import Fp8Weight
from benchmarks.decode_fixture import shuffled_tables, token_bytes
from benchmarks.flops import FlopCounter
from benchmarks.measure import DeviceRates, kernels_in, time_call
from benchmarks.random_drafts import RandomDraft
from benchmarks.rows import SEEN, Bench, BenchRow
from builders import AttentionSpec
from spec_decode.drafter import Drafter, DrafterConfig, Strategy, VerifiedTokens
from spec_decode.drafter.strategies.base import LoopStrategy
from spec_decode.model_api import DraftModel
from spec_decode.models.layers.moe import MixtureOfExperts
from spec_decode.models.target_head import TargetHead
from spec_decode.paged.kv_groups import make_group


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedDraft:
    """A draft model of one layer group, its attention and the context of its requests."""

    model: DraftModel
    spec: AttentionSpec
    context: int

    @classmethod
    def of(cls, case: RandomDraft, device: torch.device) -> TimedDraft:
        """Make one of the drafts with random weights."""
        model = case.make(device)
        (group,) = model.layer_groups(case.page_size)
        return cls(model=model, spec=group.spec, context=case.context)

    @property
    def at_once(self) -> bool:
        """Whether it proposes all K tokens in one step, which is then the whole round."""
        return self.model.drafts_at_once

    @property
    def layers(self) -> tuple[int, ...]:
        (group,) = self.model.layer_groups(self.spec.page_size)
        return group.layers

    def step_us(self, rates: DeviceRates, num_reqs: int, flops: Mapping[str, int]) -> float:
        """Return the least time of a 16-bit step: for each weight its transfer or its arithmetic, whichever is longer,
        plus the KV it attends to. flops: by weight; empty if only bytes count."""
        seen = min(self.context, self.spec.sliding_window or self.context)
        kv_bytes = num_reqs * seen * token_bytes(self.spec) * len(self.layers)
        read = weights_read(self.model, num_reqs, whole_round=self.at_once)
        weights_us = sum(rates.least_us(size, flops.get(name, 0)) for name, size in read.items())
        return weights_us + rates.least_us(kv_bytes)

    def counted(self, passes: int) -> str:
        """Describe what a floor of `passes` steps counts."""
        narrow = any(isinstance(module, Fp8Weight) for module in self.model.modules())
        seen = f"and {SEEN}{'; weights of 8 bits as if they had 16' if narrow else ''}"
        if self.at_once:
            return f"every weight but embeddings once, or the products with it where these take longer, {seen}"
        return f"{passes} times the weights of a later step, of a mixture those of the expected experts, {seen}"

    def labels(self, case: str, run: RoundConfig) -> BenchRow:
        """Return the columns that identify a row."""
        shape = {"spec": self.spec.describe(), "num_reqs": run.num_reqs, "context": self.context}
        return {"case": case, "backend": run.backend.name, "strategy": run.strategy.value, **shape}


@dataclass(frozen=True, slots=True)
class RoundConfig:
    """How a round runs: its backend, strategy, draft tokens and number of requests."""

    backend: AttentionBackend
    strategy: Strategy
    num_speculative_tokens: int
    num_reqs: int
    temperature: float = 0.0


WHOLE, STEPS = "round", "steps"
"""Parts of a round: all of it with its inputs in place, and only its later steps."""


@torch.no_grad()
def time_round(bench: Bench, draft: TimedDraft, run: RoundConfig, names: Mapping[str, str]) -> Iterator[BenchRow]:
    """Yield a row for each part that `names` gives a case name to, with the time and memory of its graphs."""
    k, num_reqs = run.num_speculative_tokens, run.num_reqs
    flops = round_flops(draft, run, bench.device) if draft.at_once and bench.rates else {}
    drafter = None
    for part, name in names.items():
        # The graph of a whole round cannot run single steps.
        if drafter is None or (part == STEPS and issubclass(run.strategy.implementation, LoopStrategy)):
            drafter = make_drafter(draft, run, bench.device, step_0_in_graph=part == WHOLE)
            drafter.propose(_verified(draft, run, bench.device))
        call, passes, prepare = _part(drafter, part, num_reqs, 1 if draft.at_once else k)
        prepare()
        # A temperature does not change the kernels, and counting them takes longer than timing.
        kernels = kernels_in(call) / passes if bench.on_cuda and not run.temperature else None
        timing = time_call(call, bench.device, prepare=prepare)
        floor = bench.rates and round(passes * draft.step_us(bench.rates, num_reqs, flops), 3)
        yield {
            **draft.labels(name, run),
            "num_speculative_tokens": k,
            **asdict(timing),
            "kernels_per_step": kernels and round(kernels, 2),
            "floor_us": floor,
            "floor_counts": floor and draft.counted(passes),
            "temperature": run.temperature,
            "floor_ratio": timing.gpu_us and floor and round(timing.gpu_us["p50"] / floor, 3),
            "capture_seconds": round(sum(report.seconds for report in drafter.graphs.reports), 4),
            "graph_bytes": drafter.graphs.bytes_used,
        }


def _part(
    drafter: Drafter, part: str, num_reqs: int, passes: int
) -> tuple[Callable[[], object], int, Callable[[], object]]:
    """Return the call to time, how many steps of the draft it runs, and an untimed call to make before it."""
    if part == WHOLE:
        return drafter.propose, passes, lambda: None
    # Later steps advance the shared state: step 0 resets it before each call.
    return lambda: drafter.launch_later_steps(num_reqs), passes - 1, lambda: drafter.launch_step_0(num_reqs)


def round_flops(draft: TimedDraft, run: RoundConfig, device: torch.device) -> dict[str, int]:
    """Return the floating-point operations of a one-step round by weight, including rows that no token needs."""
    weights, read = weights_of(draft.model), weights_read(draft.model, run.num_reqs, whole_round=True)
    # Backends do not multiply by weights, and some kernels' ops cannot run under the counter's dispatch mode.
    counted = replace(run, backend=get("torch_reference"), strategy=Strategy.EAGER)
    drafter = make_drafter(draft, counted, device)
    counter = FlopCounter({name: weights[name] for name in read})
    with counter:
        drafter.propose(_verified(draft, run, device))
    return counter.flops


def make_drafter(draft: TimedDraft, run: RoundConfig, device: torch.device, *, step_0_in_graph: bool = True) -> Drafter:
    """Make a drafter over random pages."""
    limit = draft.context + 2 * run.num_speculative_tokens + 2
    tables, num_pages = shuffled_tables(draft.spec.page_size, run.num_reqs, limit, device)
    group = make_group("draft", run.backend, draft.spec, draft.layers, num_pages=num_pages, device=device)
    config = DrafterConfig(
        num_speculative_tokens=run.num_speculative_tokens,
        strategy=run.strategy,
        capture_sizes=[run.num_reqs],
        step_0_in_graph=step_0_in_graph,
    )
    return Drafter(draft.model, [group], tables, config)


def _verified(draft: TimedDraft, run: RoundConfig, device: torch.device) -> VerifiedTokens:
    """Return the same inputs for every strategy: the experts that tokens choose decide what a step reads."""
    rows, width = run.num_reqs, run.num_speculative_tokens + 1
    generator = torch.Generator(device).manual_seed(0)

    def tokens(*shape: int) -> torch.Tensor:
        return torch.randint(0, draft.model.vocab_size, shape, device=device, generator=generator)

    target_hidden_states = torch.randn(rows, width, draft.model.target_states_size, device=device, generator=generator)
    return VerifiedTokens(
        token_ids=tokens(rows, width),
        target_hidden_states=target_hidden_states.to(draft.spec.dtype),
        context_lens=torch.full((rows,), draft.context, dtype=torch.int32, device=device),
        accepted=torch.full((rows,), run.num_speculative_tokens // 2, dtype=torch.int32, device=device),
        next_tokens=tokens(rows),
        temperature=torch.full((rows,), run.temperature, device=device),
        seeds=torch.arange(rows, device=device),
    )


_TABLES = ("embed", "candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
"""Weights that a step reads only a few rows of."""


def weights_of(model: DraftModel) -> dict[str, torch.Tensor]:
    """Return every weight (of 8-bit ones the values), and the target's head if the model has none."""
    weights: dict[str, torch.Tensor] = dict(model.named_parameters())
    for name, module in model.named_modules():
        if isinstance(module, Fp8Weight):
            weights[name] = module.values
        elif isinstance(module, TargetHead) and module.weight is None and module.shared is not None:
            weights[name] = module.shared
    return weights


def weights_read(model: DraftModel, num_reqs: int, *, whole_round: bool = False) -> dict[str, float]:
    """Return the bytes of weights that a later step with `num_reqs` requests reads: without embeddings, codebooks and
    weights that only step 0 uses, and with a mixture's experts in the number its tokens are expected to choose if all
    are equally likely. Weights of 8 bits count as the 16 bits they are compared with.

    whole_round: for a draft whose step 0 is the whole round, include what step 0 uses.
    """
    of_step_0 = type(model).combine is not DraftModel.combine and not whole_round
    unread = (*_TABLES, "fc.", "aux.") if of_step_0 else _TABLES
    shares = {
        f"{name}.experts.": 1 - (1 - module.routing.top_k / module.routing.num_experts) ** num_reqs
        for name, module in model.named_modules()
        if isinstance(module, MixtureOfExperts)
    }

    def share(name: str) -> float:
        return next((share for prefix, share in shares.items() if name.startswith(prefix)), 1.0)

    return {
        name: share(name) * weight.numel() * max(weight.element_size(), 2)
        for name, weight in weights_of(model).items()
        if not name.startswith(unread)
    }
