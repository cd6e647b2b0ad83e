"""Family builder: what build() and advance() mean, checked field by field and through the resulting attention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from builders import AdvanceLevel, HostLengths
from spec_decode.conformance.cases import base_cases, joined, page_cases
from spec_decode.conformance.check import Family
from spec_decode.conformance.coverage import ADVANCE, with_case
from spec_decode.graphs import runtime_for
from spec_decode.testing.batches import DECODE, MAX_SEQ_LEN, SINGLE, VERIFY, Batch, Case
from spec_decode.testing.built_batch import BuiltBatch
from spec_decode.testing.host_reads import expect_no_wait, refuse_host_reads
from spec_decode.testing.metadata_fields import (
    changed_since,
    copies_of,
    expect_same_fields,
    host_fields_of,
    memory_layouts_of,
    moved_since,
    tensors_of,
)
from spec_decode.testing.outcome import Measurements, Unsupported, expect, worst
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.subject import Subject

check = Family("builder", covers=with_case(ADVANCE))

_DECODES = base_cases({"decode": DECODE, "single": SINGLE})
_DECODE = base_cases({"decode": DECODE})
_PAGED_DECODE = page_cases({"decode": DECODE})
_STEPS = 4
_CACHE = "step {}: the cache holds each request's tokens and nothing else"


@check("build() never writes into the batch", _DECODE, covers=with_case())
def build_leaves_the_batch_alone(subject: Subject, case: Case) -> None:
    fixture = PagedFixture(subject, case.spec, case.batch.rows)
    view = fixture.view(fixture.load(case.batch), case.batch)
    before = copies_of(view)
    fixture.builder().build(view, horizon=_STEPS)
    changed = changed_since(before, view)
    expect(not changed, contract="build() leaves its input unchanged", expected="no change", got=changed)


@check("a build for the same batch shape reuses its addresses for the current batch", _DECODE, covers=with_case())
def build_reuses_its_addresses(subject: Subject, case: Case) -> Measurements:
    fixture = PagedFixture(subject, case.spec, case.batch.rows)
    built = BuiltBatch(fixture, case.batch)
    first = memory_layouts_of(built.metadata)
    fixture.exchange_tails()
    built.put_in(replace(case.batch, seq_lens=tuple(n + 1 for n in case.batch.seq_lens)))
    rebuilt = built.builder.build(built.view())
    moved = moved_since(first, rebuilt)
    expect(
        not moved,
        contract="a rebuild writes into the buffers that a graph was captured with",
        expected="the same addresses",
        got=f"{moved} moved",
    )
    if subject.no_attention:
        return {}
    return built.expect_attention("attention of a rebuild, with other pages after the first ones", metadata=rebuilt)


@check(
    "P1: build at t, move the shared state, advance: every field equals a fresh build at t+1",
    joined(_DECODES, _PAGED_DECODE),
    advances=True,
    shrink=True,
)
def advance_means_a_rebuild(subject: Subject, case: Case) -> None:
    built = BuiltBatch.of(subject, case, horizon=_STEPS)
    for step in range(1, _STEPS + 1):
        built.advance()
        expect_same_fields(built.metadata, built.fresh(horizon=_STEPS - step), f"step {step} of P1")


@check(
    "after n advances the metadata describes the advanced batch: same attention, every token in its own slot only",
    joined(_DECODES, _PAGED_DECODE),
    advances=True,
    shrink=True,
    quick="base-single",
)
def advance_attends_right(subject: Subject, case: Case) -> Measurements:
    built = BuiltBatch.of(subject, case, horizon=_STEPS)
    measured = []
    for step in range(_STEPS + 1):
        if step:
            built.advance()
        measured.append(built.expect_attention(f"attention at step {step}", cache=_CACHE.format(step)))
    return worst(measured)


@check(
    "P2: build for one batch, overwrite the shared state with another, advance: every field equals a fresh build",
    joined(base_cases({"decode": DECODE, "verify": VERIFY}), _PAGED_DECODE),
    advances=True,
    shrink=True,
)
def advance_refreshes_another_batch(subject: Subject, case: Case) -> Measurements:
    query, rows = case.batch.query_lens[0], case.batch.rows
    shorter = Batch((query,), (query,), rows)
    longer = Batch((query,) * rows, (MAX_SEQ_LEN - _STEPS,) * rows, rows)
    measured = []
    # The second batch catches fields that only grow; the third, fields refreshed only if lengths or first pages change.
    for before in (shorter, longer, case.batch):
        built_for = f"built for requests of {list(before.seq_lens)} tokens"
        fixture = PagedFixture(subject, case.spec, rows)
        built = BuiltBatch(fixture, before, horizon=_STEPS)
        # Like requests with a shared prefix, each keeps its first page.
        fixture.exchange_tails()
        built.replace(case.batch)
        expect_same_fields(built.metadata, built.fresh(horizon=_STEPS), f"P2, {built_for}")
        if not subject.no_attention:
            measured.append(built.expect_attention(f"attention after P2's refresh, {built_for}"))
    return worst(measured)


def _preplanned(subject: Subject) -> Iterable[tuple[str, Case]]:
    """Return the cases in which the builder claims to plan ahead; there is nothing to test in the others."""
    return [
        (name, case)
        for name, case in _DECODES(subject)
        if subject.backend.supports(case.spec, subject.device)
        and subject.backend.builder.advance_support(case.spec, subject.device).level is AdvanceLevel.PREPLANNED
    ]


@check("metadata planned from host lengths of later steps is right when each step runs", _preplanned)
def plans_ahead_attend_right(subject: Subject, case: Case) -> Measurements:
    fixture, batch = PagedFixture(subject, case.spec, case.batch.rows), case.batch
    built = BuiltBatch(fixture, batch)
    steps = [[n + step for n in batch.seq_lens] for step in range(1, _STEPS + 1)]
    preplanned = [fixture.builder().build(fixture.view(built.buffers, batch, lens)) for lens in steps]
    for request, length in enumerate(batch.seq_lens):
        fixture.put(request, range(length))
    measured = []
    for step, metadata in enumerate(preplanned, start=1):
        built.move()
        contract = f"attention at planned step {step}"
        measured.append(built.expect_attention(contract, cache=_CACHE.format(step), metadata=metadata))
    return worst(measured)


@check(
    "metadata serves every batch within its capture constants, even beyond the bound it was built for",
    base_cases({"decode": Batch((1, 1), (5, 30), 3)}),
    advances=True,
    since=(1, 1),
)
def constants_are_served(subject: Subject, case: Case) -> Measurements:
    fixture, rows = PagedFixture(subject, case.spec, case.batch.rows), case.batch.rows
    built = BuiltBatch(fixture, case.batch, max_seq_len=64)
    longest = min(built.builder.capture_constants(built.metadata).max_seq_len, fixture.max_seq_len)
    built.replace(Batch((1,) * rows, (longest,) * rows, rows))
    return built.expect_attention(f"attention over {longest} tokens, within the capture constants")


@check(
    "build() reads nothing from the device if the builder needs no host lengths",
    base_cases({"decode": DECODE, "verify": VERIFY}),
    covers=with_case(),
    since=(1, 1),
)
def build_reads_no_device(subject: Subject, case: Case) -> None:
    host_lengths = subject.backend.builder.host_lengths
    if host_lengths is not HostLengths.NONE:
        raise Unsupported(f"the builder needs host lengths: {host_lengths.value}")
    # The first build of a shape is allowed to plan it.
    built = BuiltBatch.of(subject, case)
    unknown = replace(built.view(), host_seq_lens=None, host_seq_lens_exact=False)
    read = [*tensors_of(unknown).values(), *tensors_of(built.metadata).values()]
    with (
        expect_no_wait("host_lengths NONE: a build never waits for the device", "device work only"),
        refuse_host_reads(subject.device, read),
    ):
        built.builder.build(unknown)


@check(
    "build() treats host lengths as upper bounds unless they are marked exact",
    base_cases({"decode": DECODE, "verify": VERIFY}),
    covers=with_case(),
    since=(1, 2),
)
def host_lengths_may_be_bounds(subject: Subject, case: Case) -> Measurements:
    if subject.engine or subject.backend.builder.host_lengths is HostLengths.EXACT:
        raise Unsupported("the builder is given exact lengths")
    built = BuiltBatch.of(subject, case)
    live, bound = len(case.batch.seq_lens), built.fixture.max_seq_len
    bounds = (bound,) * live + (0,) * (case.batch.rows - live)
    bounded = replace(built.view(), host_seq_lens=bounds, host_seq_lens_exact=False)
    metadata = built.builder.build(bounded)
    return built.expect_attention(f"attention of a build with host lengths bounded by {bound}", metadata=metadata)


@check("advance() keeps every address, shape, dtype and host field", _DECODE, advances=True)
def advance_keeps_addresses(subject: Subject, case: Case) -> None:
    built = BuiltBatch.of(subject, case, horizon=_STEPS)
    before, host = memory_layouts_of(built.metadata), host_fields_of(built.metadata)
    for _ in range(2):
        built.advance()
    moved = moved_since(before, built.metadata)
    expect(not moved, contract="advance() is in place", expected="the same tensors", got=f"{moved} replaced")
    expect(
        host == host_fields_of(built.metadata),
        contract="advance() leaves host fields alone",
        expected=str(host),
        got=host_fields_of(built.metadata),
    )


@check("advance() can be captured: no host read, no data-dependent shape", _DECODE, advances=True)
def advance_is_device_work(subject: Subject, case: Case) -> None:
    built = BuiltBatch.of(subject, case, horizon=_STEPS)
    with expect_no_wait("advance() only enqueues device work", "a capture"):
        runtime_for(subject.device).capture(lambda: built.builder.advance(built.metadata))


@check("exactly the declared step fields change with the position")
def step_fields_are_complete(subject: Subject, case: None) -> None:
    declared, changed = set(subject.backend.builder.step_fields), set()
    empty: set[str] = set()
    for _, case_ in _DECODE(subject):
        if subject.backend.supports(case_.spec, subject.device):
            moved, without = _fields_that_move(subject, case_)
            changed |= moved
            empty |= without
    undeclared = [f"{name} changed and is not declared" for name in sorted(changed - declared)]
    still = [f"{name} is declared and never changed" for name in sorted(declared - empty - changed)]
    expect(
        not undeclared and not still,
        contract="every field that depends on the position is declared, and every declared one moves",
        expected="step_fields that name exactly the fields that change",
        got="; ".join([*undeclared, *still]),
    )


def _fields_that_move(subject: Subject, case: Case) -> tuple[set[str], set[str]]:
    """Return the fields whose content changes on the way to the limit, and those this spec's kernel leaves empty."""
    built = BuiltBatch.of(subject, case)
    before = copies_of(built.metadata)
    changed: set[str] = set()
    for _ in range(MAX_SEQ_LEN - max(case.batch.seq_lens) + 2):
        built.move()
        changed.update(changed_since(before, built.fresh()))
    return changed, {name for name, tensor in before.items() if not tensor.numel()}


@check("padding rows keep seq_len 0 and slot -1, and write and read nothing", _DECODE, advances=True)
def padding_stays_inert(subject: Subject, case: Case) -> None:
    batch = Batch((1, 1), (5, 16), 6)
    built = BuiltBatch(PagedFixture(subject, case.spec, batch.rows), batch, horizon=2)
    for step in range(3):
        if step:
            built.advance()
        padding = built.attend()[len(batch.seq_lens) :]
        built.fixture.expect_cache(built.seq_lens, contract="padding rows write nothing")
        expect(
            bool((padding == 0).all()),
            contract="padding rows attend to nothing",
            expected="output 0",
            got=padding.abs().max().item(),
        )


@check("a request at its limit becomes inert, raises the flag and writes nothing", _DECODE, advances=True)
def limits_hold(subject: Subject, case: Case) -> Measurements:
    size = case.spec.page_size
    batch = Batch((1, 1, 1), (2 * size - 1, 40, MAX_SEQ_LEN - 1), 4)
    fixture = PagedFixture(subject, case.spec, batch.rows, limits=[2 * size, 160, MAX_SEQ_LEN, 160])
    built, queries = BuiltBatch(fixture, batch, horizon=3), fixture.queries(batch)
    out = built.attend(queries)
    for _ in range(3):
        built.advance()
        built.seq_lens = [min(n, limit) for n, limit in zip(built.seq_lens, fixture.limits, strict=False)]
        out = built.attend(queries)
    fixture.expect_cache(built.seq_lens, contract="a request at its limit writes nothing more")
    flags = fixture.tables.overflow.tolist()
    expect(flags == [1, 0, 1, 0], contract="the overflow flag is raised", expected="[1, 0, 1, 0]", got=flags)
    return fixture.assert_within_budget(
        out[1:2], [43], queries[1:2], requests=[1], contract="the other requests continue"
    )
