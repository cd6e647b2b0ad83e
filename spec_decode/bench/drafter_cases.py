"""Rounds of a drafter, every strategy side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_backends.triton_paged import TritonPaged
from builders import AttentionBatch, PagedMetadata, RequestTables, TritonPagedBuilder
from spec_decode.bench.measure import Timing, kernels_in, time_call
from spec_decode.drafter import Drafter, VerifiedTokens
from spec_decode.kv_groups import make_group
from spec_decode.models import EagleDraft, LlamaTarget, ModelConfig
from spec_decode.strategy import Strategy

_PAGE = 16


@dataclass(frozen=True, slots=True)
class DrafterCase:
    """A draft model's shape and the rounds to time with it."""

    description: str
    config: ModelConfig
    dtype: torch.dtype
    num_reqs: tuple[int, ...]
    steps: tuple[int, ...]
    context: int


def _config(hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, vocab: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=1,
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=2048,
    )


DRAFTERS = {
    "drafter-1024": DrafterCase(
        "a drafter of hidden size 1024, 32k vocabulary",
        _config(1024, 2816, 8, 2, 128, 32000),
        torch.bfloat16,
        (1, 32),
        (4, 7),
        1024,
    ),
    "drafter-llama3-8b": DrafterCase(
        "the shape of Llama-3-8B's EAGLE draft: hidden size 4096, 128k vocabulary",
        _config(4096, 14336, 32, 8, 128, 128256),
        torch.bfloat16,
        (1, 32),
        (4, 7),
        1024,
    ),
    "drafter-tiny": DrafterCase(
        "a drafter small enough for the CPU's emulator",
        _config(64, 96, 4, 2, 64, 256),
        torch.float32,
        (1, 4),
        (4,),
        64,
    ),
}


class _RebuiltBuilder(TritonPagedBuilder):
    """The same metadata, rebuilt between steps: overriding build() drops the claim to advance in the graph."""

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> PagedMetadata:
        return super().build(batch, horizon=horizon)


class _Rebuilt(TritonPaged):
    name = "triton_paged_rebuilt"
    builder = _RebuiltBuilder


def drafter_rows(name: str, device: torch.device, bandwidth: float | None) -> Iterator[dict[str, Any]]:
    """Rows a strategy and shape: the whole round with its inputs in place, the same behind copies of them, and its
    later steps alone.
    """
    case = DRAFTERS[name]
    model = _model(case, device)
    for steps in case.steps:
        for num_reqs in case.num_reqs:
            for backend, strategy in (
                (TritonPaged(), Strategy.FULL_LOOP),
                (TritonPaged(), Strategy.PER_STEP),
                (_Rebuilt(), Strategy.PER_STEP),
                (TritonPaged(), Strategy.EAGER),
            ):
                yield from _strategy_rows(name, model, backend, strategy, steps, num_reqs, device, bandwidth)


@torch.no_grad()
def _strategy_rows(
    name: str,
    model: EagleDraft,
    backend: TritonPaged,
    strategy: Strategy,
    steps: int,
    num_reqs: int,
    device: torch.device,
    bandwidth: float | None,
) -> Iterator[dict[str, Any]]:
    case = DRAFTERS[name]
    drafter, verified = _scene(case, model, backend, strategy, steps, num_reqs, device)

    def with_copies() -> None:
        drafter.propose(verified)

    def whole() -> None:
        drafter.propose()

    def step_0() -> None:
        drafter.run_extend(num_reqs)

    def later_steps() -> None:
        drafter.run_steps(num_reqs)

    with_copies()
    on_cuda = device.type == "cuda"
    # Later steps move the shared state on, so that an untimed step 0 must put it back before each.
    parts = (
        (f"{name}/round", whole, steps, lambda: None),
        (f"{name}/round+copies", with_copies, steps, lambda: None),
        (f"{name}/steps", later_steps, steps - 1, step_0),
    )
    for part, call, passes, prepare in parts:
        prepare()
        kernels = kernels_in(call) / passes if on_cuda else None
        yield {
            "case": part,
            "backend": backend.name,
            "strategy": strategy.value,
            "num_reqs": num_reqs,
            "num_speculative_tokens": steps,
            "context": case.context,
            **timing_fields(time_call(call, device, prepare=prepare)),
            "kernels_per_step": kernels and round(kernels, 2),
            "floor_us": _floor(case, model, num_reqs, passes, bandwidth),
        }


def _scene(
    case: DrafterCase,
    model: EagleDraft,
    backend: TritonPaged,
    strategy: Strategy,
    steps: int,
    num_reqs: int,
    device: torch.device,
) -> tuple[Drafter, VerifiedTokens]:
    limit = case.context + 2 * steps + 2
    each = -(-limit // _PAGE)
    spec = case.config.attention_spec(_PAGE, case.dtype)
    group = make_group("draft", backend, spec, [0], num_pages=num_reqs * each, device=device)
    tables = RequestTables(
        page_sizes=[_PAGE], num_pages=[num_reqs * each], max_reqs=num_reqs, max_seq_len=limit, device=device
    )
    order = torch.randperm(num_reqs * each, generator=torch.Generator().manual_seed(0)).view(num_reqs, each)
    tables.load([order.tolist()], [limit] * num_reqs)
    drafter = Drafter(
        model,
        [group],
        tables,
        num_speculative_tokens=steps,
        strategy=strategy,
        capture_sizes=[num_reqs],
    )
    width = steps + 1
    verified = VerifiedTokens(
        token_ids=torch.randint(0, case.config.vocab_size, (num_reqs, width), device=device),
        hidden_states=torch.randn(num_reqs, width, case.config.hidden_size, device=device).to(case.dtype),
        context_lens=torch.full((num_reqs,), case.context, dtype=torch.int32, device=device),
        accepted=torch.full((num_reqs,), steps // 2, dtype=torch.int32, device=device),
        next_tokens=torch.randint(0, case.config.vocab_size, (num_reqs,), device=device),
        temperature=torch.zeros(num_reqs, device=device),
        seeds=torch.arange(num_reqs, device=device),
    )
    return drafter, verified


def _model(case: DrafterCase, device: torch.device) -> EagleDraft:
    with torch.device(device):
        target = LlamaTarget(replace(case.config, num_layers=0))
        draft = EagleDraft(case.config, target)
    for parameter in (*target.parameters(), *draft.parameters()):
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(case.dtype)
    return draft


def _floor(case: DrafterCase, model: EagleDraft, num_reqs: int, passes: int, bandwidth: float | None) -> float | None:
    """Bytes that `passes` steps must move (weights, output projection, KV read) over the copy bandwidth."""
    if bandwidth is None:
        return None
    size = case.dtype.itemsize
    weights = sum(parameter.numel() for parameter in model.parameters()) * size
    head = case.config.vocab_size * case.config.hidden_size * size
    kv = num_reqs * case.context * 2 * case.config.num_kv_heads * case.config.head_dim * size
    return round(passes * (weights + head + kv) / bandwidth, 3)


def timing_fields(timing: Timing) -> dict[str, Any]:
    """A timing as fields of a row."""
    return {"wall_us": timing.wall_us, "host_us": timing.host_us, "gpu_us": timing.gpu_us}
