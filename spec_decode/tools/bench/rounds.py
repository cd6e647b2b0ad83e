"""A drafter's round, timed whole and in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

import torch

from attn_backends import AttentionBackend
from builders import AttentionSpec
from spec_decode.drafter import Drafter, DrafterConfig, Strategy, VerifiedTokens
from spec_decode.drafter.kv_groups import make_group
from spec_decode.models import DraftModel, EagleDraft, LlamaTarget, ModelConfig
from spec_decode.tools.bench.decode_fixture import shuffled_tables, token_bytes
from spec_decode.tools.bench.measure import kernels_in, time_call
from spec_decode.tools.bench.rows import Bench, BenchRow


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterCase:
    """A draft model's shape, its cache, and the rounds to time with it."""

    description: str
    config: ModelConfig
    dtype: torch.dtype
    num_reqs: tuple[int, ...]
    num_speculative_tokens: tuple[int, ...]
    context: int
    page_size: int = 16
    kv_dtype: torch.dtype | None = None
    """None means dtype."""

    @property
    def spec(self) -> AttentionSpec:
        """The attention of the draft's layer."""
        return replace(self.config.attention_spec(self.page_size, self.dtype), kv_dtype=self.kv_dtype)

    def shape(self) -> DraftShape:
        """The size of this draft."""
        config, itemsize = self.config, self.dtype.itemsize
        layer = make_model(self, torch.device("meta"))
        weights = sum(parameter.numel() for parameter in layer.parameters()) + config.vocab_size * config.hidden_size
        return DraftShape(spec=self.spec, context=self.context, weight_bytes=lambda num_reqs: weights * itemsize)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftShape:
    """The attention, context and size of a draft. weight_bytes: of a step for that many requests, output projection
    included."""

    spec: AttentionSpec
    context: int
    weight_bytes: Callable[[int], float]

    def step_bytes(self, num_reqs: int) -> float:
        """What a step must move at least: the weights, and the KV that it sees."""
        seen = min(self.context, self.spec.sliding_window or self.context)
        return self.weight_bytes(num_reqs) + num_reqs * seen * token_bytes(self.spec)

    def labels(self, case: str, run: RoundConfig) -> BenchRow:
        """The columns that say what a row is of."""
        shape = {"spec": self.spec.describe(), "num_reqs": run.num_reqs, "context": self.context}
        return {"case": case, "backend": run.backend.name, "strategy": run.strategy.value, **shape}


@dataclass(frozen=True, slots=True)
class RoundConfig:
    """How a round is run: by which backend, in which strategy, for how many tokens of how many requests."""

    backend: AttentionBackend
    strategy: Strategy
    num_speculative_tokens: int
    num_reqs: int
    temperature: float = 0.0


WHOLE, COPIES, STEPS = "round", "round+copies", "steps"
"""Parts of a round: all of it with its inputs in place, the same after copies of them, and its later steps alone."""


def make_model(case: DrafterCase, device: torch.device) -> EagleDraft:
    """A draft of that shape with random weights."""
    with torch.device(device):
        target = LlamaTarget(replace(case.config, num_layers=0, latent=None))
        draft = EagleDraft(case.config, target)
    for parameter in (*target.parameters(), *draft.parameters()):
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(case.dtype)
    return draft


@torch.no_grad()
def time_round(
    bench: Bench, shape: DraftShape, model: DraftModel, run: RoundConfig, names: Mapping[str, str]
) -> Iterator[BenchRow]:
    """A row for each part that `names` gives a case name to, with the time and memory of its graphs."""
    drafter, verified = make_drafter(shape, model, run, bench.device)
    drafter.propose(verified)
    k, num_reqs = run.num_speculative_tokens, run.num_reqs
    parts: dict[str, tuple[Callable[[], object], int, Callable[[], object]]] = {
        WHOLE: (drafter.propose, k, lambda: None),
        COPIES: (lambda: drafter.propose(verified), k, lambda: None),
        # Later steps advance the shared state: an untimed step 0 restores it before each.
        STEPS: (lambda: drafter.run_steps(num_reqs), k - 1, lambda: drafter.run_extend(num_reqs)),
    }
    for part, name in names.items():
        call, passes, prepare = parts[part]
        prepare()
        # A temperature changes no kernel, and counting them takes longer than timing.
        kernels = kernels_in(call) / passes if bench.on_cuda and not run.temperature else None
        timing = time_call(call, bench.device, prepare=prepare)
        floor = bench.floor_us(passes * shape.step_bytes(num_reqs))
        yield {
            **shape.labels(name, run),
            "num_speculative_tokens": k,
            **asdict(timing),
            "kernels_per_step": kernels and round(kernels, 2),
            "floor_us": floor,
            "temperature": run.temperature,
            "floor_ratio": timing.gpu_us and floor and round(timing.gpu_us["p50"] / floor, 3),
            "capture_seconds": round(sum(report.seconds for report in drafter.graphs.reports), 4),
            "graph_bytes": drafter.graphs.bytes_used,
        }


def make_drafter(
    shape: DraftShape, model: DraftModel, run: RoundConfig, device: torch.device
) -> tuple[Drafter, VerifiedTokens]:
    """A drafter over random pages, and a round's inputs."""
    limit = shape.context + 2 * run.num_speculative_tokens + 2
    tables, num_pages = shuffled_tables(shape.spec.page_size, run.num_reqs, limit, device)
    group = make_group("draft", run.backend, shape.spec, [0], num_pages=num_pages, device=device)
    config = DrafterConfig(
        num_speculative_tokens=run.num_speculative_tokens, strategy=run.strategy, capture_sizes=[run.num_reqs]
    )
    return Drafter(model, [group], tables, config), _verified(shape, model, run, device)


def _verified(shape: DraftShape, model: DraftModel, run: RoundConfig, device: torch.device) -> VerifiedTokens:
    """The same in every strategy: which experts of a mixture the tokens take decides what a step reads."""
    rows, width = run.num_reqs, run.num_speculative_tokens + 1
    generator = torch.Generator(device).manual_seed(0)

    def tokens(*shape: int) -> torch.Tensor:
        return torch.randint(0, model.vocab_size, shape, device=device, generator=generator)

    target_hidden_states = torch.randn(rows, width, model.target_states_size, device=device, generator=generator)
    return VerifiedTokens(
        token_ids=tokens(rows, width),
        target_hidden_states=target_hidden_states.to(shape.spec.dtype),
        context_lens=torch.full((rows,), shape.context, dtype=torch.int32, device=device),
        accepted=torch.full((rows,), run.num_speculative_tokens // 2, dtype=torch.int32, device=device),
        next_tokens=tokens(rows),
        temperature=torch.full((rows,), run.temperature, device=device),
        seeds=torch.arange(rows, device=device),
    )
