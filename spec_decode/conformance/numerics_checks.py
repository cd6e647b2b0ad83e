"""Family numerics: attention against the oracle, over specs and batch shapes."""

from __future__ import annotations

import math

from spec_decode.conformance.cases import spec_cases
from spec_decode.conformance.check import Family
from spec_decode.conformance.coverage import with_case
from spec_decode.testing.batches import DECODE, RAGGED, SINGLE, VERIFY, Case
from spec_decode.testing.expectations import Measurements, expect
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.subject import Subject

check = Family("numerics", covers=with_case())


@check(
    "attention over the paged cache is attention over the logical prefix, within twice a low-precision reference's "
    "error",
    spec_cases({"decode": DECODE, "single": SINGLE, "verify": VERIFY, "ragged": RAGGED}),
    shrink=True,
    quick="*-single",
)
def attention_is_right(subject: Subject, case: Case) -> Measurements:
    built = PagedFixture(subject, case.spec, case.batch.rows).build(case.batch)
    return built.expect_attention("attention", cache="write_kv stores each token in its slot and nothing else")


@check(
    "a head whose sink is -inf has none, one whose sink is +inf comes out as 0, and so does a padding row of both",
    spec_cases({"decode": DECODE}, ("sinks", "window_sinks_cap", "window_sinks", "deepseek_v4", "deepseek_v4_packed")),
    since=(1, 1),
)
def infinite_sinks_are_defined(subject: Subject, case: Case) -> Measurements:
    fixture = PagedFixture(subject, case.spec, case.batch.rows)
    assert fixture.sinks is not None and fixture.device_sinks is not None
    for sinks in (fixture.sinks, fixture.device_sinks):
        sinks[::3], sinks[1::3] = -math.inf, math.inf
    queries = fixture.queries(case.batch)
    out = fixture.build(case.batch).attend(queries)
    live = sum(case.batch.query_lens)
    expect(
        bool(out[:, 1::3].eq(0).all() and out[live:].eq(0).all()),
        contract="a sink of +inf leaves the tokens no weight, and a row without tokens has no output",
        expected="0 in the heads of sink +inf and in the padding rows",
        got=f"up to {out[:, 1::3].abs().max().item():.2e} and {out[live:].abs().max().item():.2e}",
    )
    return fixture.assert_within_budget(out, case.batch.seq_lens, queries, contract="attention beside infinite sinks")
