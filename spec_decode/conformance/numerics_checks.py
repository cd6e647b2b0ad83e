"""Family numerics: attention compared with the oracle, over specs and batch shapes."""

from __future__ import annotations

import math

import torch

from attn_backends import FP8_DS_MLA, cache_layout
from builders import BatchError
from spec_decode.conformance.cases import SCALE_OF_LOW_SCORES, base_cases, edge_cases, spec_cases
from spec_decode.conformance.check import Family
from spec_decode.conformance.coverage import with_case
from spec_decode.testing.batches import DECODE, RAGGED, SINGLE, VERIFY, Batch, Case
from spec_decode.testing.built_batch import BuiltBatch
from spec_decode.testing.metadata_fields import changed_since, copies_of
from spec_decode.testing.outcome import Measurements, Unsupported, expect
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.poison import bits
from spec_decode.testing.subject import Subject

_LAYOUTS = base_cases({"decode": Batch((1, 1, 1), (1, 33, 142), 4), "verify": Batch((3, 3), (17, 60), 3)})

_STORED = "write_kv stores each token in its slot and nothing else"

check = Family("numerics", covers=with_case())


@check(
    "attention over the paged cache equals that over the logical prefix, within twice a low-precision reference's "
    "error",
    spec_cases({"decode": DECODE, "single": SINGLE, "verify": VERIFY, "ragged": RAGGED}),
    shrink=True,
    quick="*-single",
)
def attention_is_right(subject: Subject, case: Case) -> Measurements:
    built = BuiltBatch.of(subject, case)
    return built.expect_attention("attention", cache=_STORED)


@check(
    "a head with sink -inf acts as without one, a head with sink +inf outputs 0, and so do padding rows of both",
    spec_cases({"decode": DECODE}, ("sinks", "window_sinks_cap", "window_sinks", "deepseek_v4", "deepseek_v4_packed")),
    since=(1, 1),
)
def infinite_sinks_are_defined(subject: Subject, case: Case) -> Measurements:
    fixture = PagedFixture(subject, case.spec, case.batch.rows)
    assert fixture.sinks is not None and fixture.device_sinks is not None
    for sinks in (fixture.sinks, fixture.device_sinks):
        sinks[::3], sinks[1::3] = -math.inf, math.inf
    queries = fixture.queries(case.batch)
    out = BuiltBatch(fixture, case.batch).attend(queries)
    live = sum(case.batch.query_lens)
    expect(
        bool(out[:, 1::3].eq(0).all() and out[live:].eq(0).all()),
        contract="a sink of +inf leaves the tokens no weight, and a row without tokens has no output",
        expected="0 in the heads of sink +inf and in the padding rows",
        got=f"up to {out[:, 1::3].abs().max().item():.2e} and {out[live:].abs().max().item():.2e}",
    )
    return fixture.assert_within_budget(out, case.batch.seq_lens, queries, contract="attention next to infinite sinks")


@check(
    "attention is right at unusual sizes: many rows, long contexts, large scores, groups, pages, dims, windows",
    edge_cases,
    shrink=True,
    since=(1, 1),
)
def edges_are_right(subject: Subject, case: Case) -> Measurements:
    lowest = subject.backend.capabilities.lowest_score
    if case.spec.softmax_scale >= SCALE_OF_LOW_SCORES and lowest is not None:
        raise Unsupported(f"claims that scores below {lowest:,.0f} can count as masked")
    return BuiltBatch.of(subject, case).expect_attention("attention", cache=_STORED)


@check("keys and values are read and written by their own strides", _LAYOUTS, since=(1, 1))
def strides_are_followed(subject: Subject, case: Case) -> Measurements:
    fixture = PagedFixture(subject, case.spec, case.batch.rows)
    if cache_layout(case.spec) is FP8_DS_MLA:
        raise Unsupported("the bytes of an fp8_ds_mla page are contiguous")
    fixture.interleave()
    try:
        return BuiltBatch(fixture, case.batch).expect_attention(
            "attention over strided heads and tokens", cache=_STORED
        )
    except BatchError as refusal:
        raise Unsupported(str(refusal)) from refusal


@check("rows that share the pages of a prefix all read them", _LAYOUTS, since=(1, 1))
def shared_pages_are_read_by_each_row(subject: Subject, case: Case) -> Measurements:
    query, shared = case.batch.query_lens[0], 2 * case.spec.page_size
    batch = Batch((query,) * 3, tuple(shared + query + more for more in (0, 1, case.spec.page_size)), 4)
    fixture = PagedFixture(subject, case.spec, batch.rows, max_seq_len=max(batch.seq_lens))
    fixture.share_prefix(2)
    return BuiltBatch(fixture, batch).expect_attention("attention over a shared prefix", cache=_STORED)


@check("forward() changes neither its metadata, nor its query, nor an earlier output", _LAYOUTS, since=(1, 1))
def forward_leaves_its_inputs_alone(subject: Subject, case: Case) -> None:
    fixture = PagedFixture(subject, case.spec, case.batch.rows)
    metadata = BuiltBatch(fixture, case.batch).metadata
    query, key, value = fixture.inputs(case.batch, case.batch.seq_lens, fixture.queries(case.batch))
    subject.backend.write_kv(key, value, fixture.cache, metadata)
    before, original = copies_of(metadata), query.clone()
    out = fixture.forward(query, metadata)
    returned = bits(out).clone()
    fixture.forward(query.flip(-1), metadata)
    changed = changed_since(before, metadata) + ([] if torch.equal(query, original) else ["query"])
    changed += [] if torch.equal(bits(out), returned) else ["the previous output"]
    expect(
        not changed,
        contract="the group's next layer gets the same metadata, and a model can read its queries and outputs again",
        expected="no change",
        got=f"{changed} changed",
    )
