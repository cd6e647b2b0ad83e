"""Later draft steps against the alternative: the same step, as one module under torch.compile in a CUDA graph.

The compiled step has the easier task: all requests have one length, known at compile time, keys and values are
contiguous without pages, and there is no metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from attn_backends import get
from benchmarks.measure import CallTimes, time_call
from benchmarks.random_drafts import PUBLISHED_DRAFTS
from benchmarks.rounds import STEPS, RoundConfig, TimedDraft, time_round
from benchmarks.rows import Bench, BenchRow, with_limits
from builders import AttentionKind, AttentionSpec
from spec_decode.drafter import Strategy
from spec_decode.graphs import runtime_for
from spec_decode.model_api import AttentionInputs, DraftInputs
from spec_decode.tools.timing_limit import TimingLimit

SUFFIX = "-compiled"
"""Appended to a draft's name: its steps next to the compiled ones."""
_NUM_SPECULATIVE_TOKENS = 7
_NO_SLOWER = TimingLimit("peer_ratio", 1.0)
_NAMESPACES = ("attn_backends", "builders", "spec_decode")
"""Namespaces of the ops that this project defines."""

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Maps tokens int64 [R], hidden states [R, H] and positions int64 [R] to the next tokens and hidden states."""


def compiled_step_rows(bench: Bench, *, name: str) -> Iterator[BenchRow]:
    """Yield rows of a published draft at its smallest and largest number of requests, since each shape compiles for a
    minute: one of this library, with its time over the compiled step's, and one of the compiled step."""
    case = PUBLISHED_DRAFTS[name]
    draft = TimedDraft.of(case, bench.device)
    for num_reqs in sorted({min(case.num_reqs), max(case.num_reqs)}):
        run = RoundConfig(get(case.backends[0]), Strategy.FULL_LOOP, _NUM_SPECULATIVE_TOKENS, num_reqs)
        with bench.noting(f"{name}{SUFFIX}", at=f"{num_reqs} requests"):
            yield from comparison_rows(bench, f"{name}{SUFFIX}", draft, run)


def comparison_rows(bench: Bench, case: str, draft: TimedDraft, run: RoundConfig) -> Iterator[BenchRow]:
    """Yield the two rows of one draft and round configuration."""
    (ours,) = time_round(bench, draft, run, {STEPS: case})
    step = CompiledStep(draft, run.num_reqs, bench.device)

    def steps() -> None:
        for _ in range(run.num_speculative_tokens - 1):
            step()

    theirs = _peer(ours, time_call(steps, bench.device))
    yield with_limits({**ours, "peer_ratio": round(_p50(ours) / _p50(theirs), 3)}, _NO_SLOWER)
    yield theirs


def _p50(row: BenchRow) -> float:
    return float((row["gpu_us"] or row["wall_us"])["p50"])


def _peer(ours: BenchRow, times: CallTimes) -> BenchRow:
    """Return the compiled step's row, with the same shape columns."""
    same = ("case", "spec", "num_reqs", "context", "num_speculative_tokens", "floor_us", "floor_counts")
    row = {"backend": "torch.compile", "peer": True, "strategy": Strategy.PER_STEP.value, **asdict(times)}
    return {**{name: ours[name] for name in same}, **row}


class ContiguousAttention:
    """Attention of one token per request, each after `context` tokens of random keys and values."""

    def __init__(
        self, spec: AttentionSpec, layers: tuple[int, ...], *, num_reqs: int, context: int, device: torch.device
    ) -> None:
        self.spec, self.context = spec, context
        shape = (num_reqs, context + 1, spec.num_kv_heads)

        def cache(dim: int) -> dict[int, torch.Tensor]:
            return {layer: torch.randn(*shape, dim, device=device).to(spec.dtype) for layer in layers}

        self.keys = cache(spec.head_dim)
        self.values = None if spec.kind is AttentionKind.MLA else cache(spec.out_dim)

    def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
        """[R, num_q_heads, value_dim]."""
        spec, at = self.spec, slice(max(0, self.context + 1 - (self.spec.sliding_window or 1 << 62)), None)
        query, key, value = inputs.normed_and_rotated()
        keys = self.keys[inputs.layer]
        keys[:, self.context] = key
        if self.values is None:
            values = keys[..., : spec.out_dim]
        else:
            values = self.values[inputs.layer]
            values[:, self.context] = value
        return _attend(query, keys[:, at], values[:, at], spec, inputs.sinks)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec, sinks: torch.Tensor | None
) -> torch.Tensor:
    """query [R, Hq, D] over keys [R, S, Hkv, D] and values [R, S, Hkv, V]; [R, Hq, V]. Uses torch's own attention where
    possible: it supports no sinks, no soft cap and no heads of more than 256 dims."""
    scale = spec.softmax_scale
    if sinks is None and spec.soft_cap is None and spec.head_dim <= 256:
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        return F.scaled_dot_product_attention(query[:, :, None], keys, values, scale=scale, enable_gqa=True)[:, :, 0]
    grouped = query.unflatten(1, (spec.num_kv_heads, -1))
    scores = torch.einsum("rhgd,rshd->rhgs", grouped * scale, keys).float()
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    if sinks is not None:
        sink = sinks.view(1, spec.num_kv_heads, -1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : keys.shape[1]].to(values.dtype)
    return torch.einsum("rhgs,rshv->rhgv", weights, values).flatten(1, 2)


def model_step(draft: TimedDraft, num_reqs: int, device: torch.device) -> Step:
    """Return a later step of this library's model, drafting greedily."""
    model = draft.model
    attention = ContiguousAttention(draft.spec, draft.layers, num_reqs=num_reqs, context=draft.context, device=device)

    def step(
        token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = model.forward(DraftInputs(token_ids, hidden, positions, attention))
        best = model.logits(hidden).argmax(-1)
        return best if model.token_map is None else model.token_map[best], hidden

    return step


def in_plain_torch(step: Step, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.fx.GraphModule:
    """Trace the step into plain torch operations, for inputs of these shapes."""
    # With gradients on, layers use torch's products instead of the kernels for few rows.
    with torch.enable_grad():
        return make_fx(step, decomposition_table=dict(_formulas()))(*inputs)


class CompiledStep:
    """A graph of the compiled step; it reads its inputs where the previous step left its outputs."""

    def __init__(self, draft: TimedDraft, num_reqs: int, device: torch.device) -> None:
        """Compile the step, which takes a while, and capture it."""
        self.token_ids, self.hidden, self.positions = inputs = step_inputs(draft, num_reqs, device)
        self._compiled = _compile(in_plain_torch(model_step(draft, num_reqs, device), inputs))
        with torch.no_grad():
            self._step()
            self._graph = runtime_for(device).capture(self._step)

    def __call__(self) -> None:
        """Run the next step."""
        self._graph.replay()

    def _step(self) -> None:
        next_ids, states = self._compiled(self.token_ids, self.hidden, self.positions)
        self.token_ids.copy_(next_ids)
        self.hidden.copy_(states)


def _compile(module: torch.fx.GraphModule) -> Step:
    """Compile for speed. The graph is captured here: torch's own would copy its inputs before each replay."""
    compiled: Step = torch.compile(module, mode="max-autotune-no-cudagraphs", dynamic=False)
    return compiled


def step_inputs(
    draft: TimedDraft, num_reqs: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random inputs of a `Step`."""
    generator = torch.Generator(device).manual_seed(0)
    token_ids = torch.randint(0, draft.model.vocab_size, (num_reqs,), device=device, generator=generator)
    hidden = torch.randn(num_reqs, draft.model.hidden_size, device=device, generator=generator)
    positions = torch.full((num_reqs,), draft.context, device=device)
    return token_ids, hidden.to(draft.spec.dtype), positions


def _formulas() -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Yield each op of this project with its CPU implementation, a formula in plain torch that runs on any device."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, op = name.partition("::")
        if namespace in _NAMESPACES:
            overload = getattr(getattr(torch.ops, namespace), op).default
            yield overload, partial(overload._op_dk, torch._C.DispatchKey.CPU)
