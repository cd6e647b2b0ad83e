"""Family graph: a captured multi-step loop replayed over batches it was not captured on."""

from __future__ import annotations

from typing import Any

import torch

from builders import BatchBuffers, advance_shared_state, begin_extend
from spec_decode.conformance.builder_checks import _advancing, worse
from spec_decode.conformance.cases import DECODE, VERIFY, Batch, Case, base_cases, demand
from spec_decode.conformance.check import Evidence, Subject, check, expect
from spec_decode.graphs import Graph, runtime_for
from spec_decode.testing.paged_fixture import PagedFixture

_STEPS = 5
_CASES = base_cases({"decode": DECODE})
_BATCHES = {
    "as_large": Batch((1,) * 5, (1, 15, 16, 17, 130), 7),
    "shrunk": Batch((1, 1), (31, 3), 7),
    "grown": Batch((1,) * 7, (12, 14, 15, 16, 60, 1, 150), 7),
}


class _Loop:
    """_STEPS advances with attention over persistent inputs, run eagerly or captured."""

    def __init__(self, world: PagedFixture, rows: int) -> None:
        spec, device = world.spec, world.device
        self.world, self.rows = world, rows
        shape = (_STEPS, rows)
        self.query = torch.zeros(*shape, spec.num_q_heads, spec.head_dim, dtype=spec.dtype, device=device)
        self.key = torch.zeros(*shape, spec.num_kv_heads, spec.head_dim, dtype=spec.new_kv_dtype, device=device)
        self.value = torch.zeros(*shape, spec.num_kv_heads, spec.out_dim, dtype=spec.new_kv_dtype, device=device)
        self.out = torch.zeros(*shape, spec.num_q_heads, spec.out_dim, dtype=spec.dtype, device=device)

    def run(self, buffers: BatchBuffers, builder: Any, metadata: Any) -> None:
        backend, world = self.world.subject.backend, self.world
        for step in range(_STEPS):
            advance_shared_state(buffers, self.rows)
            builder.advance(metadata)
            backend.write_kv(self.key[step], self.value[step], world.cache, metadata)
            out = backend.forward(self.query[step], world.cache, metadata, spec=world.spec, sinks=world.device_sinks)
            self.out[step].copy_(out)

    def fill(self, batch: Batch) -> list[list[torch.Tensor]]:
        """Fresh inputs for the steps behind `batch`."""
        self.out.fill_(float("nan"))
        asked = []
        for step in range(_STEPS):
            lens = [n + step + 1 for n in batch.seq_lens]
            queries = self.world.queries(batch)
            for target, source in zip(
                (self.query, self.key, self.value),
                self.world.inputs(batch, lens, queries, self.rows),
                strict=True,
            ):
                target[step].copy_(source)
            asked.append(queries)
        return asked


def _capture(world: PagedFixture, loop: _Loop, buffers: BatchBuffers, builder: Any, batch: Batch) -> Graph:
    """Capture the loop on a batch of padding rows but for one short request."""
    dummy = Batch((1,), (1,), batch.rows)
    world.load_tables(1)
    buffers.load(dummy.query_lens, dummy.seq_lens, pad_reqs=dummy.rows)
    metadata = builder.build(world.view(buffers, dummy), horizon=_STEPS)
    loop.run(buffers, builder, metadata)
    buffers.load(dummy.query_lens, dummy.seq_lens, pad_reqs=dummy.rows)
    metadata = builder.build(world.view(buffers, dummy), horizon=_STEPS)
    return runtime_for(world.device).capture(lambda: loop.run(buffers, builder, metadata))


def _replay_and_judge(
    world: PagedFixture, loop: _Loop, buffers: BatchBuffers, graph: Graph, batch: Batch, name: str
) -> Evidence:
    world.poison()
    world.load_tables(len(batch.seq_lens))
    world.reload(buffers, batch)
    for request, length in enumerate(batch.seq_lens):
        world.put(request, range(length))
    asked = loop.fill(batch)
    graph.replay()
    replayed = loop.out.clone()
    worst: Evidence = {}
    for step, queries in enumerate(asked):
        lens = [n + step + 1 for n in batch.seq_lens]
        contract = f"step {step + 1} of a replay over the batch '{name}'"
        worst = worse(worst, world.judge(replayed[step], batch, lens, queries, contract=contract))
    world.expect_cache([n + _STEPS for n in batch.seq_lens], contract=f"writes of a replay over '{name}'")
    return worst


@check(
    "graph.loop_replays_over_other_batches",
    "one captured loop, replayed over batches of other lengths, smaller and larger, is right at every step",
    _CASES,
)
def loop_replays_over_other_batches(subject: Subject, case: Case) -> Evidence:
    _advancing(subject, case)
    world = PagedFixture(subject, case.spec, DECODE.rows)
    buffers, builder, loop = world.load(case.batch), world.builder(), _Loop(world, DECODE.rows)
    graph = _capture(world, loop, buffers, builder, case.batch)
    worst: Evidence = {}
    for name, batch in _BATCHES.items():
        worst = worse(worst, _replay_and_judge(world, loop, buffers, graph, batch, name))
    return worst


@check(
    "graph.replay_equals_eager",
    "a replay gives, bit for bit, what the same steps give with fresh builds",
    _CASES,
)
def replay_equals_eager(subject: Subject, case: Case) -> None:
    _advancing(subject, case)
    world = PagedFixture(subject, case.spec, DECODE.rows)
    buffers, builder, loop = world.load(case.batch), world.builder(), _Loop(world, DECODE.rows)
    graph = _capture(world, loop, buffers, builder, case.batch)
    batch = _BATCHES["grown"]
    _replay_and_judge(world, loop, buffers, graph, batch, "grown")
    replayed = loop.out.clone()
    world.reload(buffers, batch)
    for step in range(_STEPS):
        advance_shared_state(buffers, batch.rows)
        fresh = world.builder().build(world.view(buffers, batch, [n + step + 1 for n in batch.seq_lens]))
        subject.backend.write_kv(loop.key[step], loop.value[step], world.cache, fresh)
        out = subject.backend.forward(loop.query[step], world.cache, fresh, spec=world.spec, sinks=world.device_sinks)
        expect(
            torch.equal(out, replayed[step]),
            contract=f"step {step + 1} of the replay equals a fresh build's",
            expected="the same bits",
            got=f"a difference of {(out - replayed[step]).abs().max().item():.2e}",
        )


@check(
    "graph.two_sizes_interleave",
    "graphs of two padded sizes over the same buffers do not disturb each other",
    _CASES,
)
def two_sizes_interleave(subject: Subject, case: Case) -> Evidence:
    _advancing(subject, case)
    world = PagedFixture(subject, case.spec, DECODE.rows)
    buffers, builder = world.load(case.batch), world.builder()
    small = Batch((1, 1), (16, 45), 2)
    loops = {batch.rows: _Loop(world, batch.rows) for batch in (case.batch, small)}
    graphs = {batch.rows: _capture(world, loops[batch.rows], buffers, builder, batch) for batch in (case.batch, small)}
    worst: Evidence = {}
    for batch in (small, _BATCHES["grown"], small, _BATCHES["shrunk"]):
        found = _replay_and_judge(world, loops[batch.rows], buffers, graphs[batch.rows], batch, f"{batch.rows} rows")
        worst = worse(worst, found)
    return worst


@check(
    "graph.verify_replays_over_other_batches",
    "a captured uniform step of 1 + K tokens, as step 0 is, replayed over another batch is right",
    base_cases({"verify": VERIFY}),
)
def verify_replays_over_other_batches(subject: Subject, case: Case) -> Evidence:
    demand(subject.backend, case.spec, subject.device)
    _advancing(subject, case)
    batch, world = case.batch, PagedFixture(subject, case.spec, case.batch.rows)
    query_len, device = batch.query_lens[0], world.device
    dummy = Batch((query_len,), (query_len,), batch.rows)
    buffers, builder = world.load(dummy), world.builder()
    buffers.set_uniform(query_len)
    context = torch.zeros(batch.rows, dtype=torch.int32, device=device)
    metadata = builder.build(world.view(buffers, dummy))
    queries = world.queries(batch)
    tokens = batch.rows * query_len
    inputs = world.inputs(batch, batch.seq_lens, queries, tokens)
    out = torch.zeros_like(inputs[0])[..., : case.spec.out_dim]

    def run() -> None:
        begin_extend(buffers, context, batch.rows, query_len)
        builder.advance(metadata)
        subject.backend.write_kv(inputs[1], inputs[2], world.cache, metadata)
        found = subject.backend.forward(inputs[0], world.cache, metadata, spec=world.spec, sinks=world.device_sinks)
        out.copy_(found)

    world.tables.token_limits.zero_()
    run()
    graph = runtime_for(device).capture(run)
    world.poison()
    world.load_tables(len(batch.seq_lens))
    for request, length in enumerate(batch.seq_lens):
        world.put(request, range(length - query_len))
    context[: len(batch.seq_lens)] = torch.tensor(
        [n - query_len for n in batch.seq_lens], dtype=torch.int32, device=device
    )
    graph.replay()
    world.expect_cache(batch.seq_lens, contract="writes of a replayed uniform step")
    return world.judge(out, batch, batch.seq_lens, queries, contract="a replayed uniform step")
