"""Family numerics: attention against the oracle, over specs and batch shapes."""

from __future__ import annotations

from spec_decode.conformance.cases import spec_cases
from spec_decode.conformance.check import Family
from spec_decode.conformance.coverage import with_case
from spec_decode.testing.batches import DECODE, RAGGED, SINGLE, VERIFY, Case
from spec_decode.testing.expectations import Measurements
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.subject import Subject

check = Family("numerics", covers=with_case())


@check(
    "attention over the paged cache is attention over the logical prefix, within twice a low-precision reference's "
    "error",
    spec_cases({"decode": DECODE, "single": SINGLE, "verify": VERIFY, "ragged": RAGGED}),
    shrink=True,
)
def attention_is_right(subject: Subject, case: Case) -> Measurements:
    built = PagedFixture(subject, case.spec, case.batch.rows).build(case.batch)
    return built.expect_attention("attention", cache="write_kv stores each token in its slot and nothing else")
