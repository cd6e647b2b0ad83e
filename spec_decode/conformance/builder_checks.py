"""Family builder: what build() and advance() mean, field by field and by the attention that comes out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from builders import AdvanceLevel, AttentionSpec, advance_shared_state
from spec_decode.conformance.cases import (
    DECODE,
    MAX_SEQ_LEN,
    SINGLE,
    VERIFY,
    Batch,
    Case,
    base_cases,
    demand,
    joined,
    page_cases,
)
from spec_decode.conformance.check import Evidence, Subject, Unsupported, check, expect
from spec_decode.conformance.contract_checks import host_fields_of, tensors_of
from spec_decode.graphs import CaptureError, runtime_for
from spec_decode.testing.error_location import raised_in
from spec_decode.testing.paged_fixture import PagedFixture, advance
from spec_decode.testing.shrink import on_smallest

_DECODES = base_cases({"decode": DECODE, "single": SINGLE})
_DECODE = base_cases({"decode": DECODE})
_PAGED_DECODE = page_cases({"decode": DECODE})
_STEPS = 4


def _advancing(subject: Subject, case: Case) -> None:
    """Advance checks are for builders that claim an in-graph advance; others say why they do not."""
    demand(subject.backend, case.spec, subject.device)
    support = subject.backend.builder.advance_support(case.spec, subject.device)
    if support.level is not AdvanceLevel.IN_GRAPH:
        raise Unsupported(f"advance is {support.level.name}: {support.reason}")


@check("builder.build_leaves_the_batch_alone", "build() never writes into the batch", _DECODE)
def build_leaves_the_batch_alone(subject: Subject, case: Case) -> None:
    demand(subject.backend, case.spec, subject.device)
    world = PagedFixture(subject, case.spec, case.batch.rows)
    view = world.view(world.load(case.batch), case.batch)
    before = {name: tensor.clone() for name, tensor in tensors_of(view).items()}
    world.builder().build(view, horizon=_STEPS)
    changed = [name for name, tensor in tensors_of(view).items() if not torch.equal(tensor, before[name])]
    expect(not changed, contract="build() is pure towards its input", expected="no change", got=changed)


@check("builder.build_reuses_its_addresses", "the same batch shape gives the same addresses again", _DECODE)
def build_reuses_its_addresses(subject: Subject, case: Case) -> None:
    demand(subject.backend, case.spec, subject.device)
    world = PagedFixture(subject, case.spec, case.batch.rows)
    buffers, builder = world.load(case.batch), world.builder()
    first = builder.build(world.view(buffers, case.batch))
    advance_shared_state(buffers, case.batch.rows)
    second = builder.build(world.view(buffers, case.batch, [n + 1 for n in case.batch.seq_lens]))
    expect_same_addresses(first, second, "a rebuild lands in the buffers that a graph was captured with")


@check(
    "builder.advance_means_a_rebuild",
    "P1: built at t, shared state moved, advance: every field is what a fresh builder builds at t+1",
    joined(_DECODES, _PAGED_DECODE),
)
def advance_means_a_rebuild(subject: Subject, case: Case) -> None:
    _advancing(subject, case)
    on_smallest(lambda batch: _rebuild_after_each_step(subject, case.spec, batch), case.batch)


def _rebuild_after_each_step(subject: Subject, spec: AttentionSpec, batch: Batch) -> None:
    world = PagedFixture(subject, spec, batch.rows)
    buffers, builder = world.load(batch), world.builder()
    metadata = builder.build(world.view(buffers, batch), horizon=_STEPS)
    for step in range(1, _STEPS + 1):
        advance(world, buffers, batch, builder, metadata)
        lens = [n + step for n in batch.seq_lens]
        fresh = world.builder().build(world.view(buffers, batch, lens), horizon=_STEPS - step)
        expect_same_fields(metadata, fresh, f"step {step} of P1")


@check(
    "builder.advance_attends_right",
    "after n advances the metadata means the advanced batch: same attention, every token in its slot, none elsewhere",
    joined(_DECODES, _PAGED_DECODE),
)
def advance_attends_right(subject: Subject, case: Case) -> Evidence:
    _advancing(subject, case)
    return on_smallest(lambda batch: _attend_after_each_step(subject, case.spec, batch), case.batch)


def _attend_after_each_step(subject: Subject, spec: AttentionSpec, batch: Batch) -> Evidence:
    world = PagedFixture(subject, spec, batch.rows)
    buffers, builder = world.load(batch), world.builder()
    metadata = builder.build(world.view(buffers, batch), horizon=_STEPS)
    lens = list(batch.seq_lens)
    worst: Evidence = {}
    for step in range(_STEPS + 1):
        if step:
            advance(world, buffers, batch, builder, metadata)
            lens = [n + 1 for n in lens]
        queries = world.queries(batch)
        out = world.attend(metadata, batch, lens, queries, num_tokens=batch.rows)
        world.expect_cache(lens, contract=f"step {step}: the cache holds each request's tokens and nothing else")
        worst = worse(worst, world.judge(out, batch, lens, queries, contract=f"attention at step {step}"))
    return worst


@check(
    "builder.advance_refreshes_another_batch",
    "P2: built on one batch, shared state overwritten with another, advance: it means a fresh build of that one",
    joined(base_cases({"decode": DECODE, "verify": VERIFY}), _PAGED_DECODE),
)
def advance_refreshes_another_batch(subject: Subject, case: Case) -> Evidence:
    _advancing(subject, case)
    return on_smallest(lambda batch: _refresh_over(subject, case.spec, batch), case.batch)


def _refresh_over(subject: Subject, spec: AttentionSpec, batch: Batch) -> Evidence:
    """From a batch that is shorter in every row, and from one that is longer: what only grows shows in the second."""
    query = batch.query_lens[0]
    shorter = Batch((query,), (query,), batch.rows)
    longer = Batch((query,) * batch.rows, (MAX_SEQ_LEN - _STEPS,) * batch.rows, batch.rows)
    return worse(*(_refresh(subject, spec, before, batch) for before in (shorter, longer)))


def _refresh(subject: Subject, spec: AttentionSpec, before: Batch, batch: Batch) -> Evidence:
    world, built_on = PagedFixture(subject, spec, batch.rows), f"built on requests of {list(before.seq_lens)} tokens"
    buffers, builder = world.load(before), world.builder()
    metadata = builder.build(world.view(buffers, before), horizon=_STEPS)
    world.poison()
    world.load_tables(len(batch.seq_lens))
    world.reload(buffers, batch)
    builder.advance(metadata)
    fresh = world.builder().build(world.view(buffers, batch), horizon=_STEPS)
    expect_same_fields(metadata, fresh, f"P2, {built_on}")
    queries = world.queries(batch)
    tokens = batch.rows * batch.query_lens[0]
    out = world.attend(metadata, batch, batch.seq_lens, queries, num_tokens=tokens)
    return world.judge(out, batch, batch.seq_lens, queries, contract=f"attention after P2's refresh, {built_on}")


def _planned(subject: Subject) -> Iterable[tuple[str, Case]]:
    """Cases of a builder that claims to plan ahead; others have nothing to show."""
    return [
        (name, case)
        for name, case in _DECODES(subject)
        if subject.backend.supports(case.spec, subject.device)
        and subject.backend.builder.advance_support(case.spec, subject.device).level is AdvanceLevel.PREPLANNED
    ]


@check(
    "builder.plans_ahead_attend_right",
    "metadata built from the host's lengths of steps to come means each of them when it runs",
    _planned,
)
def plans_ahead_attend_right(subject: Subject, case: Case) -> Evidence:
    world = PagedFixture(subject, case.spec, case.batch.rows)
    buffers, batch = world.load(case.batch), case.batch
    steps = [[n + step for n in batch.seq_lens] for step in range(1, _STEPS + 1)]
    planned = [world.builder().build(world.view(buffers, batch, lens)) for lens in steps]
    for request, length in enumerate(batch.seq_lens):
        world.put(request, range(length))
    worst: Evidence = {}
    for step, (lens, metadata) in enumerate(zip(steps, planned, strict=True), start=1):
        advance_shared_state(buffers, batch.rows)
        queries = world.queries(batch)
        out = world.attend(metadata, batch, lens, queries, num_tokens=batch.rows)
        world.expect_cache(lens, contract=f"step {step}: the cache holds each request's tokens and nothing else")
        worst = worse(worst, world.judge(out, batch, lens, queries, contract=f"attention at planned step {step}"))
    return worst


@check("builder.advance_keeps_addresses", "advance() keeps every address, shape, dtype and host field", _DECODE)
def advance_keeps_addresses(subject: Subject, case: Case) -> None:
    _advancing(subject, case)
    world = PagedFixture(subject, case.spec, case.batch.rows)
    buffers, builder = world.load(case.batch), world.builder()
    metadata = builder.build(world.view(buffers, case.batch), horizon=_STEPS)
    before = {name: describe(tensor) for name, tensor in tensors_of(metadata).items()}
    host = host_fields_of(metadata)
    for _ in range(2):
        advance(world, buffers, case.batch, builder, metadata)
    after = {name: describe(tensor) for name, tensor in tensors_of(metadata).items()}
    moved = [name for name in before if before[name] != after.get(name)]
    expect(not moved, contract="advance() is in place", expected="the same tensors", got=f"{moved} replaced")
    expect(
        host == host_fields_of(metadata),
        contract="advance() leaves host fields alone",
        expected=str(host),
        got=host_fields_of(metadata),
    )


@check(
    "builder.advance_is_device_work",
    "advance() can be captured: no host read, no data-dependent shape",
    _DECODE,
)
def advance_is_device_work(subject: Subject, case: Case) -> None:
    _advancing(subject, case)
    world = PagedFixture(subject, case.spec, case.batch.rows)
    buffers, builder = world.load(case.batch), world.builder()
    metadata = builder.build(world.view(buffers, case.batch), horizon=_STEPS)
    try:
        runtime_for(subject.device).capture(lambda: builder.advance(metadata))
    except CaptureError as error:
        got = f"{error}{raised_in(error)}"
        expect(False, contract="advance() only enqueues device work", expected="a capture", got=got)


@check("builder.step_fields_are_complete", "exactly the declared step fields change with the position")
def step_fields_are_complete(subject: Subject, case: None) -> None:
    declared, changed = set(subject.backend.builder.step_fields), set()
    empty: set[str] = set()
    for _, windowed_or_not in _DECODE(subject):
        if subject.backend.supports(windowed_or_not.spec, subject.device):
            moved, without = _fields_that_move(subject, windowed_or_not)
            changed |= moved
            empty |= without
    undeclared = [f"{name} changed and is not declared" for name in sorted(changed - declared)]
    still = [f"{name} is declared and never changed" for name in sorted(declared - empty - changed)]
    expect(
        not undeclared and not still,
        contract="every field that depends on the position is declared, and every declared one moves",
        expected="step_fields that name what changes and nothing else",
        got="; ".join([*undeclared, *still]),
    )


def _fields_that_move(subject: Subject, case: Case) -> tuple[set[str], set[str]]:
    """The fields whose content changes on the way to the limit, and those that this spec's kernel leaves empty."""
    world = PagedFixture(subject, case.spec, case.batch.rows)
    buffers, lens = world.load(case.batch), list(case.batch.seq_lens)
    metadata = world.builder().build(world.view(buffers, case.batch))
    before = {name: tensor.clone() for name, tensor in tensors_of(metadata).items()}
    changed: set[str] = set()
    for _ in range(MAX_SEQ_LEN - max(lens) + 2):
        advance_shared_state(buffers, case.batch.rows)
        lens = [n + 1 for n in lens]
        now = tensors_of(world.builder().build(world.view(buffers, case.batch, lens)))
        changed |= {name for name in before if not torch.equal(before[name], now[name])}
    return changed, {name for name, tensor in before.items() if not tensor.numel()}


@check(
    "builder.padding_stays_inert",
    "padding rows keep seq_len 0 and slot -1, and write and read nothing",
    _DECODE,
)
def padding_stays_inert(subject: Subject, case: Case) -> None:
    _advancing(subject, case)
    batch = Batch((1, 1), (5, 16), 6)
    world = PagedFixture(subject, case.spec, batch.rows)
    buffers, builder = world.load(batch), world.builder()
    metadata = builder.build(world.view(buffers, batch), horizon=2)
    for step in range(3):
        if step:
            advance(world, buffers, batch, builder, metadata)
        lens = [n + step for n in batch.seq_lens]
        out = world.attend(metadata, batch, lens, world.queries(batch), num_tokens=batch.rows)
        world.expect_cache(lens, contract="padding rows write nothing")
        expect(
            bool((out[len(lens) :] == 0).all()),
            contract="padding rows attend to nothing",
            expected="output 0",
            got=out[len(lens) :].abs().max().item(),
        )


@check("builder.limits_hold", "a request at its limit becomes inert, raises the flag and writes nothing", _DECODE)
def limits_hold(subject: Subject, case: Case) -> Evidence:
    _advancing(subject, case)
    size = case.spec.page_size
    batch = Batch((1, 1, 1), (2 * size - 1, 40, MAX_SEQ_LEN - 1), 4)
    world = PagedFixture(subject, case.spec, batch.rows, limits=[2 * size, 160, MAX_SEQ_LEN, 160])
    buffers, builder = world.load(batch), world.builder()
    metadata = builder.build(world.view(buffers, batch), horizon=3)
    queries = world.queries(batch)
    lens = list(batch.seq_lens)
    out = world.attend(metadata, batch, lens, queries, num_tokens=batch.rows)
    for _ in range(3):
        advance(world, buffers, batch, builder, metadata)
        lens = [min(n + 1, limit) for n, limit in zip(lens, world.limits, strict=False)]
        out = world.attend(metadata, batch, lens, queries, num_tokens=batch.rows)
    world.expect_cache(lens, contract="a request at its limit writes nothing more")
    flags = world.tables.overflow.tolist()
    expect(flags == [1, 0, 1, 0], contract="the overflow flag is raised", expected="[1, 0, 1, 0]", got=flags)
    still = Batch((1,), (43,), 1)
    return world_of_one(world, 1).judge(out[1:2], still, [43], queries[1:2], contract="the others go on")


def world_of_one(world: PagedFixture, request: int) -> PagedFixture:
    """The same world seen by one of its requests."""
    alone: PagedFixture = object.__new__(PagedFixture)
    alone.__dict__.update(world.__dict__, key=[world.key[request]], value=[world.value[request]])
    return alone


def worse(a: Evidence, b: Evidence) -> Evidence:
    """The evidence with the larger error over its budget."""
    return b if b["error_over_budget"] >= a.get("error_over_budget", -1.0) else a


def describe(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _first_difference(name: str, found: torch.Tensor, fresh: torch.Tensor) -> tuple[str, str]:
    """What was expected and found where two tensors first differ, in words."""
    if found.shape != fresh.shape:
        return f"{name} of shape {list(fresh.shape)}", str(list(found.shape))
    differing = (found != fresh).nonzero()
    where = tuple(differing[0].tolist())
    count = f"{len(differing)} of {found.numel()} elements differ"
    return f"{name}{list(where)} = {fresh[where].item()} as freshly built", f"{found[where].item()} ({count})"


def expect_same_addresses(first: Any, second: Any, contract: str) -> None:
    """Every tensor field of both metadata lies at the same address with the same shape."""
    a, b = tensors_of(first), tensors_of(second)
    moved = [name for name in a if describe(a[name]) != describe(b[name])]
    expect(not moved, contract=contract, expected="the same addresses", got=f"{moved} moved")


def expect_same_fields(found: Any, fresh: Any, contract: str) -> None:
    """Every field of `found` has the value of the freshly built one; names the first element that differs."""
    a, b = tensors_of(found), tensors_of(fresh)
    for name in a:
        if not torch.equal(a[name], b[name]):
            expected, got = _first_difference(name, a[name], b[name])
            expect(False, contract=f"{contract}: field {name} means the present batch", expected=expected, got=got)
    expect(
        host_fields_of(found) == host_fields_of(fresh),
        contract=f"{contract}: host fields hold for the whole horizon",
        expected=str(host_fields_of(fresh)),
        got=host_fields_of(found),
    )
