"""Family drafter: whole rounds of a small random draft model on the backend, in every strategy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

import torch

from builders import AttentionSpec, HostLengths
from spec_decode.conformance.check import Cases, Family
from spec_decode.conformance.coverage import every_strategy, one_strategy
from spec_decode.conformance.draft_runs import (
    Pause,
    compare,
    draft,
    draft_after_a_pause,
    expect_same,
    verified_tokens,
    without_interpreter,
)
from spec_decode.drafter import Strategy, StrategyError, VerifiedTokens
from spec_decode.graphs.emulator import HostReadGuard
from spec_decode.model_api import AttentionInputs, DraftInputs
from spec_decode.paged.kv_groups import KVGroup
from spec_decode.sampling.draft_sampler import NO_TOKEN
from spec_decode.testing import oracle
from spec_decode.testing.draft_fixture import MAX_SEQ_LEN, DraftFixture, DraftShape
from spec_decode.testing.host_reads import expect_no_wait, refuse_cuda_waits
from spec_decode.testing.outcome import Measurements, Unsupported, expect
from spec_decode.testing.subject import Subject

check = Family("drafter", covers=one_strategy)

_STEP_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
_BATCH_SIZES = (1, 2, 3, 7, 32)


def _shapes(*shapes: tuple[int, int]) -> Cases:
    """Return cases (number of speculative tokens, number of requests)."""
    return lambda subject: [(f"k{k}-n{n}", (k, n)) for k, n in shapes]


@check(
    "tokens, cached logits, cache and flags have the same bits in every strategy as in eager, greedy and sampled",
    _shapes(*product(_STEP_COUNTS, _BATCH_SIZES)),
    covers=every_strategy,
)
@without_interpreter
def strategies_agree(subject: Subject, case: tuple[int, int]) -> Measurements:
    return _compare_strategies(subject, *case)


def _compare_strategies(
    subject: Subject, steps: int, num_reqs: int, shape: DraftShape = DraftShape.ONE
) -> Measurements:
    fixture = DraftFixture.make(subject, num_reqs, steps, shape)
    compared = [compare(partial(draft, fixture, temperature=t))[1] for t in (0.0, 1.0)]
    return {"runs_compared": float(sum(compared))}


@check(
    "with a draft length per request, or a minimum confidence, every strategy drafts a prefix of the whole draft",
    _shapes((2, 3), (4, 3), (4, 7), (7, 2)),
    covers=every_strategy,
)
@without_interpreter
def requests_stop_on_their_own(subject: Subject, case: tuple[int, int]) -> Measurements:
    steps, num_reqs = case
    lengths = [(3 * row + 2) % (steps + 1) for row in range(num_reqs)]
    compared = 0
    fixture = DraftFixture.make(subject, num_reqs, steps)
    for temperature in (0.0, 1.0):
        run = partial(draft, fixture, temperature=temperature)
        whole = run(Strategy.EAGER)
        threshold, kept = _confidence_cut(whole[0, "draft tokens"], whole[0, "cached logits"])
        for short, lens, what in (
            (partial(run, draft_lens=lengths), torch.tensor(lengths), "a length per request"),
            (partial(run, min_confidence=threshold), kept, "a minimum confidence"),
        ):
            eager, strategies = compare(short)
            past_end = torch.arange(steps)[:, None] >= lens
            wanted = whole[0, "draft tokens"].cpu().masked_fill(past_end, NO_TOKEN)
            start = {(0, "draft tokens"): wanted.to(subject.device)}
            expect_same(eager, start, f"{what} ends drafts and changes no earlier token")
            compared += strategies
    return {"runs_compared": float(compared)}


@check(
    "after rounds in which one request or all drafted nothing, drafts equal those of a run without a pause",
    _shapes((1, 2), (4, 3), (3, 7)),
    covers=every_strategy,
    since=(1, 2),
)
@without_interpreter
def drafts_resume_after_a_pause(subject: Subject, case: tuple[int, int]) -> Measurements:
    steps, num_reqs = case
    fixture, compared = DraftFixture.make(subject, num_reqs, steps), 0
    for temperature in (0.0, 1.0):
        unpaused = draft_after_a_pause(fixture, Strategy.EAGER, None, temperature=temperature)
        for strategy, pause in product(Strategy, Pause):
            try:
                run = draft_after_a_pause(fixture, strategy, pause, temperature=temperature)
            except StrategyError:
                continue
            wanted = {key: unpaused[key] for key in run}
            expect_same(run, wanted, f"{strategy.value} after a pause of {pause.value}, at temperature {temperature:g}")
            compared += 1
    return {"runs_compared": float(compared)}


def _confidence_cut(tokens: torch.Tensor, logits: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Return a min_confidence that splits the first tokens in half, and how many tokens each request drafts with it.

    tokens: [K, n]; logits: [K, n, V].
    """
    confidence = logits.double().softmax(-1).gather(2, tokens.clamp(min=0)[..., None])[..., 0]
    first = confidence[0].sort().values
    threshold = float(first[len(first) // 2 - 1 : len(first) // 2 + 1].mean())
    return threshold, (confidence >= threshold).int().cumprod(0).sum(0).cpu() + 1


@check(
    "every step's logits match a dense computation over each request's logical tokens",
    _shapes((1, 3), (4, 3), (7, 2)),
)
@without_interpreter
def steps_attend_to_the_logical_prefix(subject: Subject, case: tuple[int, int]) -> Measurements:
    return _compare_with_dense(subject, *case)


_SHAPES = {f"k3-n2-{shape.value}": (3, 2, shape) for shape in (DraftShape.LAYERS, DraftShape.GROUPS)}.items()


@check(
    "each layer of a group, and of groups with other pages and windows, attends to its own logical tokens",
    lambda subject: _SHAPES,
    since=(1, 1),
)
@without_interpreter
def layers_and_groups_attend_to_their_own_prefix(subject: Subject, case: tuple[int, int, DraftShape]) -> Measurements:
    return _compare_with_dense(subject, *case)


@check(
    "with two layers in a group, and with several groups, every strategy drafts the same bits as eager",
    lambda subject: _SHAPES,
    covers=every_strategy,
    since=(1, 1),
)
@without_interpreter
def strategies_agree_on_layers_and_groups(subject: Subject, case: tuple[int, int, DraftShape]) -> Measurements:
    return _compare_strategies(subject, *case)


def _compare_with_dense(
    subject: Subject, steps: int, num_reqs: int, shape: DraftShape = DraftShape.ONE
) -> Measurements:
    """Compare a round in the chosen strategy with a dense computation of each step's logits."""
    fixture = DraftFixture.make(subject, num_reqs, steps, shape)
    drafter = fixture.drafter(None)
    context = _context_of(fixture, drafter.groups)
    drafter.tables.load(fixture.pages, [MAX_SEQ_LEN] * num_reqs)
    verified = verified_tokens(fixture, fixture.contexts(), 0.0, 0)
    drafts = drafter.propose(verified)
    reference = _dense_logits(fixture, context, verified, drafts.tokens.cpu(), torch.float64)
    low_precision = _dense_logits(fixture, context, verified, drafts.tokens.cpu(), fixture.spec.dtype)
    error = oracle.relative_error(drafts.logits.cpu(), reference)
    # A chain of steps feeds its own rounding back: two valid orders of fp32 sums drift further than one step would.
    budget = 8 * oracle.relative_error(low_precision, reference) + 256 * torch.finfo(torch.float32).eps
    expect(
        error <= budget,
        contract="draft logits over the logical prefix",
        expected=f"relative error within {budget:.2e}",
        got=f"{error:.2e}",
    )
    return {"error_over_budget": error / budget}


_Context = dict[int, tuple[AttentionSpec, torch.Tensor, torch.Tensor]]
"""Layer -> its spec, and the keys and values [length, heads, dim] that a request starts with, on the CPU."""


def _context_of(fixture: DraftFixture, groups: Sequence[KVGroup]) -> list[_Context]:
    """Return what each request starts with, read from the caches through the page tables."""
    contexts: list[_Context] = [{} for _ in range(fixture.num_reqs)]
    size = fixture.spec.page_size
    for group, rows in zip(groups, fixture.pages, strict=True):
        for context, row, length in zip(contexts, rows, fixture.contexts(), strict=True):
            page = torch.tensor([row[p // size] for p in range(length)], dtype=torch.int64)
            offset = torch.arange(length) % size
            for layer, cache in group.caches.items():
                context[layer] = group.spec, cache.key.cpu()[page, offset], cache.value.cpu()[page, offset]
    return contexts


class _DenseAttention:
    """The oracle as a model's attention: one request's logical keys and values, extended by every call of a layer."""

    def __init__(self, context: _Context, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.context = {layer: (spec, key.to(dtype), value.to(dtype)) for layer, (spec, key, value) in context.items()}

    @property
    def length(self) -> int:
        """Number of tokens before the next step's."""
        return self.context[0][1].shape[0]

    def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
        query, new_key, new_value = inputs.normed_and_rotated()
        spec, key, value = self.context[inputs.layer]
        key, value = torch.cat([key, new_key]), torch.cat([value, new_value])
        self.context[inputs.layer] = spec, key, value
        batch = oracle.LogicalBatch([query], [key], [value], [key.shape[0]], inputs.sinks)
        return oracle.attention(spec, batch, dtype=self.dtype)[0]


def _dense_logits(
    fixture: DraftFixture,
    contexts: list[_Context],
    verified: VerifiedTokens,
    drafted: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return logits [n, K, V] of each step given the drafted tokens, per request, with the oracle's attention."""
    model = fixture.model.on_cpu(dtype)
    rows = []
    for request, context in enumerate(contexts):
        attention = _DenseAttention(context, dtype)
        accepted = int(verified.accepted[request])
        ids = [*verified.token_ids[request].tolist()[1 : accepted + 1], int(verified.next_tokens[request])]
        hidden = verified.target_hidden_states[request, : accepted + 1].cpu().to(dtype)
        logits = []
        for step in range(fixture.num_speculative_tokens):
            start = attention.length
            positions = torch.arange(start, start + len(ids))
            hidden = model.forward(DraftInputs(torch.tensor(ids), hidden, positions, attention))[-1:]
            logits.append(model.logits(hidden)[0])
            ids = [int(drafted[request, step])]
        rows.append(torch.stack(logits))
    return torch.stack(rows).double()


@check(
    "a round of the chosen strategy, and of the device loop, only enqueues device work",
    lambda subject: [("k4-n3", None), (f"k4-n3-{Strategy.DEVICE_LOOP.value}", Strategy.DEVICE_LOOP)],
)
@without_interpreter
def a_round_never_waits(subject: Subject, case: Strategy | None) -> None:
    fixture = DraftFixture.make(subject, 3, 4)
    if subject.backend.builder.host_lengths is HostLengths.EXACT:
        raise Unsupported("the builder needs exact host lengths, so a round waits for the device")
    if subject.device.type == "cpu" and case is Strategy.DEVICE_LOOP:
        raise Unsupported("on the CPU the emulator reads the loop's continue flag on the host")
    try:
        drafter = fixture.drafter(case)
    except StrategyError as error:
        raise Unsupported(str(error)) from error
    drafter.tables.load(fixture.pages, [MAX_SEQ_LEN] * 3)
    verified = verified_tokens(fixture, fixture.contexts(), 0.0, 0)
    drafter.propose(verified)
    with (
        expect_no_wait("a round only enqueues device work", "no wait"),
        HostReadGuard() if subject.device.type == "cpu" else refuse_cuda_waits(),
    ):
        drafter.propose(verified)
