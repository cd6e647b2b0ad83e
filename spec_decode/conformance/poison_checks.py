"""Family poison: nothing outside a request's own prefix, and no uninitialised memory, reaches the output."""

from __future__ import annotations

from dataclasses import replace

import torch

from spec_decode.conformance.cases import base_cases
from spec_decode.conformance.check import Family
from spec_decode.conformance.coverage import MEMORY, with_case
from spec_decode.testing.batches import DECODE, RAGGED, VERIFY, Batch, Case
from spec_decode.testing.built_batch import BuiltBatch
from spec_decode.testing.outcome import Measurements, expect
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.poison import poisoned_allocations
from spec_decode.testing.subject import Subject

check = Family("poison", covers=with_case(MEMORY))

_SHAPES = base_cases({"decode": DECODE, "verify": VERIFY, "ragged": RAGGED})
_GARBAGE = 2**30


@check("block-table entries past a request's tokens are never followed", _SHAPES)
def stale_table_entries_are_not_read(subject: Subject, case: Case) -> Measurements:
    batch, fixture = case.batch, PagedFixture(subject, case.spec, case.batch.rows)
    built, table = BuiltBatch(fixture, batch), fixture.tables.block_tables[0]
    for request in range(batch.rows):
        length = batch.seq_lens[request] if request < len(batch.seq_lens) else 0
        table[request, -(-length // case.spec.page_size) :] = _GARBAGE
    return built.expect_attention("attention with garbage page ids in the table", metadata=built.fresh())


@check("outputs and scratch are written before they are read", _SHAPES)
def uninitialised_memory_is_not_read(subject: Subject, case: Case) -> Measurements:
    fixture = PagedFixture(subject, case.spec, case.batch.rows)
    with poisoned_allocations():
        return BuiltBatch(fixture, case.batch).expect_attention("attention over poisoned scratch")


@check("the placement of a request's pages changes no bit of its output", _SHAPES)
def page_order_does_not_matter(subject: Subject, case: Case) -> None:
    outs = []
    for shift in (0, 3):
        fixture = PagedFixture(subject, case.spec, case.batch.rows)
        fixture.pages = [[(page + shift) % fixture.num_pages for page in row] for row in fixture.pages]
        queries = [torch.ones_like(q) * 0.5 for q in fixture.queries(case.batch)]
        outs.append(BuiltBatch(fixture, case.batch).attend(queries))
    expect(
        torch.equal(*outs),
        contract="output depends only on the logical prefix",
        expected="the same bits with other pages",
        got=f"a difference of {(outs[0] - outs[1]).abs().max().item():.2e}",
    )


@check("a request's output does not depend on its neighbours", _SHAPES)
def request_order_does_not_matter(subject: Subject, case: Case) -> Measurements:
    fixture = PagedFixture(subject, case.spec, case.batch.rows)
    batch = Batch(case.batch.query_lens[::-1], case.batch.seq_lens[::-1], case.batch.rows)
    fixture.reorder(range(len(batch.seq_lens))[::-1])
    return BuiltBatch(fixture, batch).expect_attention("attention in another request order")


@check(
    "a live request with NaN and infinity in its keys, values and queries leaves its neighbours as they were", _SHAPES
)
def a_sick_request_stays_alone(subject: Subject, case: Case) -> Measurements:
    # The second of several: requests before and behind it could share its tiles.
    fixture = PagedFixture.of(subject, replace(case, sick=1))
    return BuiltBatch(fixture, case.batch).expect_attention("attention next to a request that is not finite")
