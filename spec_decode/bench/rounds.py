"""A drafter's round, timed whole and in parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from attn_backends import AttentionBackend
from builders import AttentionSpec, RequestTables
from spec_decode.bench.measure import kernels_in, time_call
from spec_decode.bench.rows import Bench, Row
from spec_decode.bench.scene import token_bytes
from spec_decode.drafter import Drafter, VerifiedTokens
from spec_decode.kv_groups import make_group
from spec_decode.models import EagleDraft, LlamaTarget, ModelConfig
from spec_decode.strategy import Strategy


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


@dataclass(frozen=True, slots=True)
class Round:
    """How a round is run: by which backend, in which strategy, for how many tokens of how many requests."""

    backend: AttentionBackend
    strategy: Strategy
    steps: int
    num_reqs: int


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
    bench: Bench, case: DrafterCase, model: EagleDraft, run: Round, names: Mapping[str, str]
) -> Iterator[Row]:
    """A row for each part that `names` gives a case name to."""
    drafter, verified = _scene(case, model, run, bench.device)

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
        kernels = kernels_in(call) / passes if bench.on_cuda else None
        timing = time_call(call, bench.device, prepare=prepare)
        yield {
            "case": name,
            "backend": run.backend.name,
            "spec": case.spec.describe(),
            "strategy": run.strategy.value,
            "num_reqs": run.num_reqs,
            "num_speculative_tokens": run.steps,
            "context": case.context,
            "wall_us": timing.wall_us,
            "host_us": timing.host_us,
            "gpu_us": timing.gpu_us,
            "kernels_per_step": kernels and round(kernels, 2),
            "floor_us": bench.floor_us(passes * _bytes_of_a_step(case, model, run.num_reqs)),
        }


def _scene(case: DrafterCase, model: EagleDraft, run: Round, device: torch.device) -> tuple[Drafter, VerifiedTokens]:
    limit = case.context + 2 * run.steps + 2
    each = -(-limit // case.page_size)
    num_pages = run.num_reqs * each
    group = make_group("draft", run.backend, case.spec, [0], num_pages=num_pages, device=device)
    tables = RequestTables(
        page_sizes=[case.page_size], num_pages=[num_pages], max_reqs=run.num_reqs, max_seq_len=limit, device=device
    )
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).view(run.num_reqs, each)
    tables.load([order.tolist()], [limit] * run.num_reqs)
    drafter = Drafter(
        model,
        [group],
        tables,
        num_speculative_tokens=run.steps,
        strategy=run.strategy,
        capture_sizes=[run.num_reqs],
    )
    return drafter, _verified(case, run, device)


def _verified(case: DrafterCase, run: Round, device: torch.device) -> VerifiedTokens:
    rows, width, vocabulary = run.num_reqs, run.steps + 1, case.config.vocab_size
    return VerifiedTokens(
        token_ids=torch.randint(0, vocabulary, (rows, width), device=device),
        features=torch.randn(rows, width, case.config.hidden_size, device=device).to(case.dtype),
        context_lens=torch.full((rows,), case.context, dtype=torch.int32, device=device),
        accepted=torch.full((rows,), run.steps // 2, dtype=torch.int32, device=device),
        next_tokens=torch.randint(0, vocabulary, (rows,), device=device),
        temperature=torch.zeros(rows, device=device),
        seeds=torch.arange(rows, device=device),
    )


def _bytes_of_a_step(case: DrafterCase, model: EagleDraft, num_reqs: int) -> int:
    """What a step must move at least: weights, output projection and the KV that it sees."""
    weights = sum(parameter.numel() for parameter in model.parameters()) * case.dtype.itemsize
    head = case.config.vocab_size * case.config.hidden_size * case.dtype.itemsize
    seen = min(case.context, case.config.sliding_window or case.context)
    return weights + head + num_reqs * seen * token_bytes(case.spec)
