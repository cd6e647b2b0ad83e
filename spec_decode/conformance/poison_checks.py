"""Family poison: nothing outside a request's own prefix, and no uninitialised memory, reaches the output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from spec_decode.conformance.cases import DECODE, RAGGED, VERIFY, Batch, Case, base_cases, demand
from spec_decode.conformance.check import Evidence, Subject, check, expect
from spec_decode.testing.paged_fixture import PagedFixture

_SHAPES = base_cases({"decode": DECODE, "verify": VERIFY, "ragged": RAGGED})
_GARBAGE = 2**30


def _run(world: PagedFixture, batch: Batch, queries: list[torch.Tensor]) -> torch.Tensor:
    view = world.view(world.load(batch), batch)
    metadata = world.builder().build(view)
    return world.attend(metadata, batch, batch.seq_lens, queries, num_tokens=view.num_tokens)


@check(
    "poison.stale_table_entries_are_not_read",
    "block-table entries past a request's tokens are never followed",
    _SHAPES,
)
def stale_table_entries_are_not_read(subject: Subject, case: Case) -> Evidence:
    demand(subject.backend, case.spec, subject.device)
    batch, world = case.batch, PagedFixture(subject, case.spec, case.batch.rows)
    queries = world.queries(batch)
    buffers = world.load(batch)
    table = world.tables.block_tables[0]
    for request in range(batch.rows):
        length = batch.seq_lens[request] if request < len(batch.seq_lens) else 0
        table[request, -(-length // case.spec.page_size) :] = _GARBAGE
    view = world.view(buffers, batch)
    metadata = world.builder().build(view)
    out = world.attend(metadata, batch, batch.seq_lens, queries, num_tokens=view.num_tokens)
    return world.judge(out, batch, batch.seq_lens, queries, contract="attention beside garbage page ids")


@check("poison.uninitialised_memory_is_not_read", "outputs and scratch are written before they are read", _SHAPES)
def uninitialised_memory_is_not_read(subject: Subject, case: Case) -> Evidence:
    demand(subject.backend, case.spec, subject.device)
    batch, world = case.batch, PagedFixture(subject, case.spec, case.batch.rows)
    queries = world.queries(batch)
    with poisoned_allocations():
        out = _run(world, batch, queries)
    return world.judge(out, batch, batch.seq_lens, queries, contract="attention over poisoned scratch")


@check("poison.page_order_does_not_matter", "where a request's pages lie changes no bit of its output", _SHAPES)
def page_order_does_not_matter(subject: Subject, case: Case) -> None:
    demand(subject.backend, case.spec, subject.device)
    outs = []
    for shift in (0, 3):
        world = PagedFixture(subject, case.spec, case.batch.rows)
        moved = [[(page + shift) % world.num_pages for page in row] for row in world.pages]
        world.pages = moved if shift else world.pages
        queries = [torch.ones_like(q) * 0.5 for q in world.queries(case.batch)]
        outs.append(_run(world, case.batch, queries))
    expect(
        torch.equal(*outs),
        contract="output depends on the logical prefix alone",
        expected="the same bits with other pages",
        got=f"a difference of {(outs[0] - outs[1]).abs().max().item():.2e}",
    )


@check("poison.request_order_does_not_matter", "a request's output does not depend on its neighbours", _SHAPES)
def request_order_does_not_matter(subject: Subject, case: Case) -> Evidence:
    demand(subject.backend, case.spec, subject.device)
    batch = case.batch
    world = PagedFixture(subject, case.spec, batch.rows)
    queries = world.queries(batch)
    order = list(range(len(batch.seq_lens)))[::-1]
    turned = replace(
        batch,
        query_lens=tuple(batch.query_lens[i] for i in order),
        seq_lens=tuple(batch.seq_lens[i] for i in order),
    )
    for name in ("pages", "key", "value"):
        rows: list[Any] = getattr(world, name)
        setattr(world, name, [rows[i] for i in order] + rows[len(order) :])
    asked = [queries[i] for i in order]
    out = _run(world, turned, asked)
    return world.judge(out, turned, turned.seq_lens, asked, contract="attention in another request order")


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """torch.empty and its kin return NaN, so that memory read before it is written shows."""

    def poisoned(make: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return wrapper

    with (
        mock.patch.object(torch, "empty", poisoned(torch.empty)),
        mock.patch.object(torch, "empty_like", poisoned(torch.empty_like)),
        mock.patch.object(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty)),
    ):
        yield
