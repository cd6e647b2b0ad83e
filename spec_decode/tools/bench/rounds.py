"""A drafter's round, timed whole and in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from attn_backends import AttentionBackend
from builders import AttentionSpec, RequestTables
from spec_decode.drafter import Drafter, DrafterConfig, VerifiedTokens
from spec_decode.drafter.kv_groups import make_group
from spec_decode.drafter.plan import Strategy
from spec_decode.models import DraftModel, EagleDraft, LlamaTarget, ModelConfig
from spec_decode.tools.bench.measure import kernels_in, time_call
from spec_decode.tools.bench.rows import Bench, BenchRow
from spec_decode.tools.bench.scene import token_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterCase:
    """A draft model's shape, its cache, and the rounds to time with it."""

    description: str
    config: ModelConfig
    dtype: torch.dtype
    num_reqs: tuple[int, ...]
    steps: tuple[int, ...]
    context: int
    page_size: int = 16
    kv_dtype: torch.dtype | None = None
    """None means dtype."""

    @property
    def spec(self) -> AttentionSpec:
        """The attention of the draft's layer."""
        return replace(self.config.attention_spec(self.page_size, self.dtype), kv_dtype=self.kv_dtype)

    def setting(self) -> Setting:
        """What a round of this draft runs over."""
        config, itemsize = self.config, self.dtype.itemsize
        layer = make_model(self, torch.device("meta"))
        weights = sum(parameter.numel() for parameter in layer.parameters()) + config.vocab_size * config.hidden_size
        return Setting(spec=self.spec, context=self.context, weight_bytes=lambda num_reqs: weights * itemsize)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What rounds run over. weight_bytes: of a step for that many requests, with the output projection."""

    spec: AttentionSpec
    context: int
    weight_bytes: Callable[[int], float]

    def step_bytes(self, num_reqs: int) -> float:
        """What a step must move at least: the weights, and the KV that it sees."""
        seen = min(self.context, self.spec.sliding_window or self.context)
        return self.weight_bytes(num_reqs) + num_reqs * seen * token_bytes(self.spec)


@dataclass(frozen=True, slots=True)
class Round:
    """How a round is run: by which backend, in which strategy, for how many tokens of how many requests."""

    backend: AttentionBackend
    strategy: Strategy
    steps: int
    num_reqs: int
    temperature: float = 0.0


WHOLE, COPIES, STEPS = "round", "round+copies", "steps"
"""Parts of a round: all of it with its inputs in place, the same behind copies of them, and its later steps alone."""


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
    bench: Bench, setting: Setting, model: DraftModel, run: Round, names: Mapping[str, str], **columns: object
) -> Iterator[BenchRow]:
    """A row for each part that `names` gives a case name to, each with `columns` and with what its graphs took."""
    drafter, verified = make_scene(setting, model, run, bench.device)

    def with_copies() -> None:
        drafter.propose(verified)

    def whole() -> None:
        drafter.propose()

    def step_0() -> None:
        drafter.run_extend(run.num_reqs)

    def later_steps() -> None:
        drafter.run_steps(run.num_reqs)

    with_copies()
    # Later steps move the shared state on, so that an untimed step 0 must put it back before each.
    parts = {
        WHOLE: (whole, run.steps, lambda: None),
        COPIES: (with_copies, run.steps, lambda: None),
        STEPS: (later_steps, run.steps - 1, step_0),
    }
    for part, name in names.items():
        call, passes, prepare = parts[part]
        prepare()
        # A temperature changes no kernel, and counting them takes longer than timing.
        kernels = kernels_in(call) / passes if bench.on_cuda and not run.temperature else None
        timing = time_call(call, bench.device, prepare=prepare)
        floor = bench.floor_us(passes * setting.step_bytes(run.num_reqs))
        yield {
            "case": name,
            "backend": run.backend.name,
            "spec": setting.spec.describe(),
            "strategy": run.strategy.value,
            "num_reqs": run.num_reqs,
            "num_speculative_tokens": run.steps,
            "context": setting.context,
            "wall_us": timing.wall_us,
            "host_us": timing.host_us,
            "gpu_us": timing.gpu_us,
            "kernels_per_step": kernels and round(kernels, 2),
            "floor_us": floor,
            "temperature": run.temperature,
            "floor_ratio": timing.gpu_us and floor and round(timing.gpu_us["p50"] / floor, 3),
            "capture_seconds": round(sum(report.seconds for report in drafter.graphs.reports), 4),
            "graph_bytes": drafter.graphs.bytes_used,
            **columns,
        }


def make_scene(setting: Setting, model: DraftModel, run: Round, device: torch.device) -> tuple[Drafter, VerifiedTokens]:
    """A drafter over random pages, and a round's inputs."""
    size, limit = setting.spec.page_size, setting.context + 2 * run.steps + 2
    each = -(-limit // size)
    num_pages = run.num_reqs * each
    group = make_group("draft", run.backend, setting.spec, [0], num_pages=num_pages, device=device)
    tables = RequestTables(
        page_sizes=[size], num_pages=[num_pages], max_reqs=run.num_reqs, max_seq_len=limit, device=device
    )
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).view(run.num_reqs, each)
    tables.load([order.tolist()], [limit] * run.num_reqs)
    config = DrafterConfig(num_speculative_tokens=run.steps, strategy=run.strategy, capture_sizes=[run.num_reqs])
    return Drafter(model, [group], tables, config), _verified(setting, model, run, device)


def _verified(setting: Setting, model: DraftModel, run: Round, device: torch.device) -> VerifiedTokens:
    """The same in every strategy: which experts of a mixture the tokens take decides what a step reads."""
    rows, width = run.num_reqs, run.steps + 1
    generator = torch.Generator(device).manual_seed(0)

    def tokens(*shape: int) -> torch.Tensor:
        return torch.randint(0, model.vocab_size, shape, device=device, generator=generator)

    target_hidden_states = torch.randn(rows, width, model.target_states_size, device=device, generator=generator)
    return VerifiedTokens(
        token_ids=tokens(rows, width),
        target_hidden_states=target_hidden_states.to(setting.spec.dtype),
        context_lens=torch.full((rows,), setting.context, dtype=torch.int32, device=device),
        accepted=torch.full((rows,), run.steps // 2, dtype=torch.int32, device=device),
        next_tokens=tokens(rows),
        temperature=torch.full((rows,), run.temperature, device=device),
        seeds=torch.arange(rows, device=device),
    )
