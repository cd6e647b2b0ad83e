"""Family graph: a captured multi-step loop replayed over batches it was not captured on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from builders import BatchBuffers, GraphSupport, MetadataBuilder, advance_state, set_extend_state
from spec_decode.conformance.cases import base_cases, joined, spec_cases
from spec_decode.conformance.check import Family
from spec_decode.conformance.coverage import ADVANCE, CAPTURE, with_case
from spec_decode.graphs import runtime_for
from spec_decode.testing.batches import DECODE, RAGGED, VERIFY, Batch, Case
from spec_decode.testing.built_batch import BuiltBatch
from spec_decode.testing.metadata_fields import expect_same_fields
from spec_decode.testing.outcome import Measurements, Unsupported, expect, worst
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.subject import Subject

check = Family("graph", covers=with_case(CAPTURE, ADVANCE))

_STEPS = 5
_CASES = base_cases({"decode": DECODE})
_FEW = Batch((1, 1), (15, 126), 3)
"""For a quick run: fewer rows and fewer steps."""
_FEW_OR_MORE = joined(spec_cases({"few": _FEW}, ("base",)), _CASES)

_BATCHES = {
    "as_large": Batch((1,) * 5, (1, 15, 16, 17, 130), 7),
    "shrunk": Batch((1, 1), (31, 3), 7),
    "grown": Batch((1,) * 7, (12, 14, 15, 16, 60, 1, 150), 7),
}


class _CapturedLoop:
    """Advances with attention over persistent inputs, captured on padding rows and one short request."""

    def __init__(
        self,
        fixture: PagedFixture,
        buffers: BatchBuffers,
        builder: MetadataBuilder[Any],
        rows: int,
        steps: int = _STEPS,
    ) -> None:
        spec, device = fixture.spec, fixture.device
        self.fixture, self.buffers, self.builder, self.rows, self.steps = fixture, buffers, builder, rows, steps
        shape = (steps, rows)
        self.query = torch.zeros(*shape, spec.num_q_heads, spec.head_dim, dtype=spec.dtype, device=device)
        self.key = torch.zeros(*shape, spec.num_kv_heads, spec.head_dim, dtype=spec.new_kv_dtype, device=device)
        self.value = torch.zeros(*shape, spec.num_kv_heads, spec.out_dim, dtype=spec.new_kv_dtype, device=device)
        self.out = torch.zeros(*shape, spec.num_q_heads, spec.out_dim, dtype=spec.dtype, device=device)
        fixture.load_tables(1)
        self._run(self._build())
        self._metadata = self._build()  # the graph keeps reading its tensors
        self.graph = runtime_for(device).capture(lambda: self._run(self._metadata))

    def _build(self) -> Any:
        dummy = Batch((1,), (1,), self.rows)
        self.buffers.load(dummy.query_lens, dummy.seq_lens, pad_reqs=dummy.rows)
        return self.builder.build(self.fixture.view(self.buffers, dummy), horizon=self.steps)

    def _run(self, metadata: Any) -> None:
        fixture = self.fixture
        for step in range(self.steps):
            advance_state(self.buffers, self.rows)
            self.builder.advance(metadata)
            fixture.subject.backend.write_kv(self.key[step], self.value[step], fixture.cache, metadata)
            self.out[step].copy_(fixture.forward(self.query[step], metadata))

    def replay(self, batch: Batch, name: str) -> Measurements:
        """Replay over another batch and compare every step with the oracle. Raises CheckFailure."""
        fixture = self.fixture
        fixture.replace_batch(self.buffers, batch)
        for request, length in enumerate(batch.seq_lens):
            fixture.put(request, range(length))
        steps = [[n + step for n in batch.seq_lens] for step in range(1, self.steps + 1)]
        filled = [self._fill(step, batch, lens) for step, lens in enumerate(steps)]
        self.out.fill_(float("nan"))
        self.graph.replay()
        measured = [
            fixture.assert_within_budget(out, lens, queries, contract=f"step {step} of a replay over '{name}'")
            for step, (out, lens, queries) in enumerate(zip(self.out, steps, filled, strict=True), start=1)
        ]
        fixture.expect_cache(steps[-1], contract=f"writes of a replay over '{name}'")
        return worst(measured)

    def _fill(self, step: int, batch: Batch, lens: list[int]) -> list[torch.Tensor]:
        queries = self.fixture.queries(batch)
        inputs = self.fixture.inputs(batch, lens, queries)
        for target, source in zip((self.query, self.key, self.value), inputs, strict=True):
            target[step].copy_(source)
        return queries


def _steps_of(case: Case) -> int:
    return 2 if case.batch is _FEW else _STEPS


def _cut(batch: Batch, rows: int) -> Batch:
    """Keep the last `rows` requests."""
    return Batch(batch.query_lens[-rows:], batch.seq_lens[-rows:], rows)


@check(
    "one captured loop, replayed over batches of other lengths, smaller and larger, is right at every step",
    _FEW_OR_MORE,
    advances=True,
)
def loop_replays_over_other_batches(subject: Subject, case: Case) -> Measurements:
    rows = case.batch.rows
    fixture = PagedFixture(subject, case.spec, rows)
    loop = _CapturedLoop(fixture, fixture.load(case.batch), fixture.builder(), rows, _steps_of(case))
    return worst(loop.replay(_cut(batch, rows), name) for name, batch in _BATCHES.items())


@check(
    "a captured loop of advances, replayed over batches of other lengths: every field equals a fresh build",
    _CASES,
    advances=True,
    since=(1, 1),
)
def replayed_advances_mean_a_rebuild(subject: Subject, case: Case) -> None:
    fixture, rows = PagedFixture(subject, case.spec, DECODE.rows), DECODE.rows
    built = BuiltBatch(fixture, Batch((1,), (1,), rows), horizon=_STEPS)

    def advance() -> None:
        for _ in range(_STEPS):
            advance_state(built.buffers, rows)
            built.builder.advance(built.metadata)

    advance()
    graph = runtime_for(fixture.device).capture(advance)
    for name, batch in _BATCHES.items():
        fixture.replace_batch(built.buffers, batch)
        graph.replay()
        view = fixture.view(built.buffers, batch, [n + _STEPS for n in batch.seq_lens])
        expect_same_fields(built.metadata, fixture.builder().build(view), f"after a replay over '{name}'")


@check("a replay equals the same steps with fresh builds, bit for bit", _FEW_OR_MORE, advances=True)
def replay_equals_eager(subject: Subject, case: Case) -> None:
    rows = case.batch.rows
    fixture, batch = PagedFixture(subject, case.spec, rows), _cut(_BATCHES["grown"], rows)
    buffers = fixture.load(case.batch)
    loop = _CapturedLoop(fixture, buffers, fixture.builder(), rows, _steps_of(case))
    loop.replay(batch, "grown")
    fixture.reload(buffers, batch)
    for step in range(loop.steps):
        advance_state(buffers, batch.rows)
        fresh = fixture.builder().build(fixture.view(buffers, batch, [n + step + 1 for n in batch.seq_lens]))
        subject.backend.write_kv(loop.key[step], loop.value[step], fixture.cache, fresh)
        out = fixture.forward(loop.query[step], fresh)
        expect(
            torch.equal(out, loop.out[step]),
            contract=f"step {step + 1} of the replay equals a fresh build's",
            expected="the same bits",
            got=f"a difference of {(out - loop.out[step]).abs().max().item():.2e}",
        )


@check("graphs of two padded sizes over the same buffers do not disturb each other", _FEW_OR_MORE, advances=True)
def two_sizes_interleave(subject: Subject, case: Case) -> Measurements:
    large, small = case.batch.rows, Batch((1, 1), (16, 45), 2)
    fixture = PagedFixture(subject, case.spec, large)
    buffers, builder = fixture.load(case.batch), fixture.builder()
    loops = {n: _CapturedLoop(fixture, buffers, builder, n, _steps_of(case)) for n in (large, small.rows)}
    order = (small, _cut(_BATCHES["grown"], large), small, _cut(_BATCHES["shrunk"], large))
    return worst(loops[batch.rows].replay(batch, f"{batch.rows} rows") for batch in order)


@check(
    "a captured uniform step of 1 + K tokens, like step 0, is right when replayed over another batch",
    base_cases({"verify": VERIFY}),
    advances=True,
)
def verify_replays_over_other_batches(subject: Subject, case: Case) -> Measurements:
    batch, fixture = case.batch, PagedFixture(subject, case.spec, case.batch.rows)
    query_len, device = batch.query_lens[0], fixture.device
    dummy = Batch((query_len,), (query_len,), batch.rows)
    buffers, builder = fixture.load(dummy), fixture.builder()
    buffers.set_uniform(query_len)
    context = torch.zeros(batch.rows, dtype=torch.int32, device=device)
    metadata = builder.build(fixture.view(buffers, dummy))
    queries = fixture.queries(batch)
    query, key, value = fixture.inputs(batch, batch.seq_lens, queries)
    out = torch.zeros_like(query)[..., : case.spec.out_dim]

    def run() -> None:
        set_extend_state(buffers, context, batch.rows, query_len)
        builder.advance(metadata)
        subject.backend.write_kv(key, value, fixture.cache, metadata)
        out.copy_(fixture.forward(query, metadata))

    fixture.tables.token_limits.zero_()
    run()
    graph = runtime_for(device).capture(run)
    fixture.poison()
    fixture.load_tables(len(batch.seq_lens))
    contexts = [n - query_len for n in batch.seq_lens]
    for request, length in enumerate(contexts):
        fixture.put(request, range(length))
    context[: len(contexts)] = torch.tensor(contexts, dtype=torch.int32, device=device)
    graph.replay()
    fixture.expect_cache(batch.seq_lens, contract="writes of a replayed uniform step")
    return fixture.assert_within_budget(out, batch.seq_lens, queries, contract="a replayed uniform step")


_SHORTER = Batch((5, 2), (35, 17), RAGGED.rows)
"""Fewer requests and tokens than RAGGED."""


@check(
    "a captured step of prompts beside decodes, padded to more tokens, is right when replayed over other batches",
    base_cases({"ragged": RAGGED}),
    advances=True,
    since=(1, 3),
)
def ragged_replays_over_other_batches(subject: Subject, case: Case) -> Measurements:
    if subject.backend.builder.graph_support < GraphSupport.ALWAYS:
        raise Unsupported("graphs are claimed only for batches whose requests have one number of tokens")
    batch, fixture = case.batch, PagedFixture(subject, case.spec, case.batch.rows)
    buffers, builder, query_len = fixture.load(batch), fixture.builder(), max(batch.query_lens) + 3
    buffers.clear()
    buffers.set_uniform(query_len)
    dummy = Batch((query_len,) * batch.rows, (query_len,) * batch.rows, batch.rows)
    view = replace(fixture.view(buffers, dummy, [0] * batch.rows), uniform=False)
    metadata = builder.build(view)
    like = fixture.inputs(batch, batch.seq_lens, fixture.queries(batch))
    query, key, value = (part.new_zeros(view.num_tokens, *part.shape[1:]) for part in like)
    out = torch.zeros_like(query)[..., : case.spec.out_dim]

    def run() -> None:
        builder.advance(metadata)
        subject.backend.write_kv(key, value, fixture.cache, metadata)
        out.copy_(fixture.forward(query, metadata))

    run()
    graph = runtime_for(fixture.device).capture(run)
    measured = []
    for other in (batch, _SHORTER):
        fixture.replace_batch(buffers, other)
        queries = fixture.queries(other)
        for part, source in zip((query, key, value), fixture.inputs(other, other.seq_lens, queries), strict=True):
            part[: len(source)].copy_(source)
        out.fill_(float("nan"))
        graph.replay()
        contract = f"a replay over requests with {', '.join(map(str, other.query_lens))} tokens"
        fixture.expect_cache(other.seq_lens, contract=f"writes of {contract}")
        measured.append(
            fixture.assert_within_budget(out[: other.num_tokens], other.seq_lens, queries, contract=contract)
        )
    return worst(measured)
