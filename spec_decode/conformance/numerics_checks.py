"""Family numerics: attention against the oracle, over specs and batch shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from attn_backends.kernels.sparse_attention import IndexedCache
from builders import AttentionBatch, AttentionSpec
from builders.compressed import compressed_window, translate_topk
from spec_decode.conformance.cases import DECODE, RAGGED, SINGLE, VERIFY, Batch, Case, base_cases, demand, spec_cases
from spec_decode.conformance.check import Evidence, Subject, check
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.shrink import on_smallest

_RATIO = 4
"""Tokens that an entry of the compressed cache stands for."""
_WIDTH = 64


@check(
    "numerics.attention_is_right",
    "attention over the paged cache is attention over the logical prefix, within twice an honest kernel's error",
    spec_cases({"decode": DECODE, "single": SINGLE, "verify": VERIFY, "ragged": RAGGED}),
)
def attention_is_right(subject: Subject, case: Case) -> Evidence:
    demand(subject.backend, case.spec, subject.device)
    return on_smallest(lambda batch: _attend(subject, case.spec, batch), case.batch)


def _attend(subject: Subject, spec: AttentionSpec, batch: Batch) -> Evidence:
    world = PagedFixture(subject, spec, batch.rows)
    view = world.view(world.load(batch), batch)
    metadata = world.builder().build(view)
    queries = world.queries(batch)
    out = world.attend(metadata, batch, batch.seq_lens, queries, num_tokens=view.num_tokens)
    world.expect_cache(batch.seq_lens, contract="write_kv stores each token in its slot and nothing else")
    return world.judge(out, batch, batch.seq_lens, queries, contract="attention")


def _with_extra_lists(subject: Subject) -> Iterable[tuple[str, Case]]:
    """No case for a backend that has no argument for them."""
    generate = base_cases({"verify": VERIFY, "ragged": RAGGED}, ("base", "deepseek_v4", "deepseek_v4_packed"))
    return generate(subject) if subject.backend.capabilities.extra_lists else []


@check(
    "numerics.extra_lists_join_the_softmax",
    "entries listed in a second, compressed cache are attended to beside the window, in one softmax",
    _with_extra_lists,
)
def extra_lists_join_the_softmax(subject: Subject, case: Case) -> Evidence:
    demand(subject.backend, case.spec, subject.device)
    batch, rows = case.batch, case.batch.rows
    world, second = PagedFixture(subject, case.spec, rows), PagedFixture(subject, case.spec, rows, seed=1)
    second.load_tables(len(batch.seq_lens))
    for request, length in enumerate(batch.seq_lens):
        second.put(request, range(length // _RATIO))
    view = world.view(world.load(batch), batch)
    metadata, queries = world.builder().build(view), world.queries(batch)
    query, key, value = world.inputs(batch, batch.seq_lens, queries, view.num_tokens)
    subject.backend.write_kv(key, value, world.cache, metadata)
    worst: Evidence = {}
    for extra, picked in (_every_entry(second, view), _every_third(second, view)):
        out = subject.backend.forward(  # type: ignore[call-arg]
            query, world.cache, metadata, spec=case.spec, sinks=world.device_sinks, extra=extra
        )
        found = _judge_with_extra(world, second, batch, queries, out, picked)
        worst = max(worst, found, key=lambda evidence: evidence.get("error_over_budget", -1.0))
    return worst


def _every_entry(second: PagedFixture, view: AttentionBatch) -> tuple[IndexedCache, slice]:
    """All complete entries, as the C128A layers list them."""
    indices = torch.empty(view.num_tokens, _WIDTH, dtype=torch.int32, device=second.device)
    lens = torch.empty(view.num_tokens, dtype=torch.int32, device=second.device)
    size, table = second.spec.page_size, second.tables.block_tables[0, : view.num_reqs]
    compressed_window(
        indices, lens, view.positions, view.seq_lens, view.query_start_loc, table,
        ratio=_RATIO, page_size=size, max_seq_len=_RATIO * _WIDTH,
    )  # fmt: skip
    return IndexedCache(second.cache.latents, indices, lens, size), slice(None)


def _every_third(second: PagedFixture, view: AttentionBatch) -> tuple[IndexedCache, slice]:
    """Entries that an indexer picked, as for the C4A layers, padded with -1."""
    entry = torch.arange(_WIDTH, device=second.device).int() * 3
    seen = ((view.positions + 1) // _RATIO)[:, None]
    topk = torch.where(entry < seen, entry, -1).int()
    size, table = second.spec.page_size, second.tables.block_tables[0, : view.num_reqs]
    slots = translate_topk(topk, view.seq_lens, view.query_start_loc, table, page_size=size)
    lens = torch.full_like(slots[:, 0], _WIDTH)
    return IndexedCache(second.cache.latents, slots, lens, size), slice(None, None, 3)


def _judge_with_extra(
    world: PagedFixture,
    second: PagedFixture,
    batch: Batch,
    queries: Sequence[torch.Tensor],
    out: torch.Tensor,
    picked: slice,
) -> Evidence:
    """Compare with one request a query token, whose tokens are those that it sees of both caches."""
    alone: PagedFixture = object.__new__(PagedFixture)
    alone.__dict__.update(world.__dict__, spec=replace(world.spec, sliding_window=None), key=[], value=[])
    window = world.spec.sliding_window
    assert window is not None
    for request, (query, length) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        for position in range(length - query, length):
            near = world.key[request][max(0, position - window + 1) : position + 1]
            far = second.key[request][: (position + 1) // _RATIO][picked]
            alone.key.append(torch.cat([near, far]))
            alone.value.append(alone.key[-1])
    lens = [len(key) for key in alone.key]
    return alone.judge(out, batch, lens, torch.cat(list(queries)).split(1), contract="attention with extra lists")
