"""Family numerics: attention against the oracle, over specs and batch shapes."""

from __future__ import annotations

from builders import AttentionSpec
from spec_decode.conformance.cases import DECODE, RAGGED, SINGLE, VERIFY, Batch, Case, demand, spec_cases
from spec_decode.conformance.check import Evidence, Subject, check
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.shrink import on_smallest


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
