"""The conformance kit over flashmla, with a stand-in for its kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from builders import AttentionBatch
from builders.flashmla import FlashMlaBuilder
from spec_decode.conformance import ConformanceFailure, check_backend
from spec_decode.graphs import runtime_for
from spec_decode.testing.outcome import Outcome
from tests import flashmla_stand_in as stand_in
from tests.factories import CPU, make_spec
from tests.flashmla_stand_in import installed
from tests.telling_checks import KIT, telling_checks


@pytest.fixture(scope="module")
def backend():
    with installed() as installed_backend:
        yield installed_backend


@pytest.mark.slow
def test_flashmla_passes_the_kit_and_numerics(backend):
    report = check_backend(backend, device=CPU, checks=telling_checks(backend, *KIT, "numerics.*"))
    attention = [result for result in report.results if result.check.startswith("numerics.")]
    served = {result.case.partition("-")[0] for result in attention if result.outcome is Outcome.PASS}
    assert {"base", "deepseek_v3", "page_64", "heads_1", "heads_20", "heads_128", "length_4099"} <= served
    assert served.isdisjoint({"page_1", "page_16", "window", "fp8_cache"})


def test_long_query_rows_are_attended_in_chunks(backend, monkeypatch):
    monkeypatch.setattr(FlashMlaBuilder, "_MAX_TOKENS", 3)
    checks = ("numerics.*", "builder.advance_attends_right", "graph.replay_equals_eager")
    telling = telling_checks(backend, *(f"{check}[[]base-*" for check in checks))
    report = check_backend(backend, device=CPU, checks=telling)
    found = {result.check for result in report.results if result.outcome is Outcome.PASS}
    assert {*checks[1:], "numerics.attention_is_right"} <= found


KILLERS = (
    "builder.advance_attends_right",
    "graph.replay_equals_eager",
    "graph.loop_replays_over_other_batches",
    "graph.blocks_replay_over_other_batches",
)


@pytest.mark.parametrize("killer", KILLERS)
def test_schedule_kept_across_calls_fails_check(backend, killer, monkeypatch):
    """As FlashMLA offers it to callers whose lengths stay: it leaves out the blocks that a request grew into."""
    kept = []

    class Keeping(type(backend)):
        def forward(self, query, cache, metadata, *, spec, sinks=None):
            known = [schedule for its, schedule in kept if its is metadata]
            if not known:
                kept.append((metadata, stand_in.FlashMLASchedMeta()))
            module = type(backend).__mro__[1].forward.__globals__["flashmla"]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "FlashMLASchedMeta", lambda: (known or [kept[-1][1]])[0])
                return super().forward(query, cache, metadata, spec=spec, sinks=sinks)

    with pytest.raises(ConformanceFailure, match=f"{killer}.*attention over the logical prefix"):
        check_backend(Keeping(), device=CPU, checks=[f"{killer}[[]base-*"])


def ragged() -> AttentionBatch:
    """Rows of 5, 1 and 4 query tokens, the last one padding by its length."""
    return AttentionBatch(
        num_reqs=3, num_tokens=10, max_query_len=5, max_seq_len=128, uniform=False,
        query_start_loc=torch.tensor([0, 5, 6, 10], dtype=torch.int32),
        seq_lens=torch.tensor([7, 70, 0], dtype=torch.int32), positions=torch.zeros(10, dtype=torch.int64),
        block_table=torch.zeros(3, 2, dtype=torch.int32), slot_mapping=torch.zeros(10, dtype=torch.int64),
        host_query_lens=(5, 1, 4),
    )  # fmt: skip


@pytest.mark.parametrize(("causal", "lens"), [(True, [5, 7, 70, 0, 0]), (False, [7, 7, 70, 0, 0])])
def test_chunk_sees_row_up_to_its_last_token(causal, lens, monkeypatch):
    monkeypatch.setattr(FlashMlaBuilder, "_MAX_TOKENS", 3)
    spec = make_spec(num_q_heads=4, num_kv_heads=1, head_dim=576, page_size=64, causal=causal)
    builder = FlashMlaBuilder(spec, CPU, max_reqs=3, max_tokens=10, max_seq_len=128)
    batch = ragged()
    metadata = builder.build(batch)
    assert [chunk[:3] for chunk in metadata.chunks] == [(0, 0, 3), (0, 3, 5), (1, 5, 6), (2, 6, 9), (2, 9, 10)]
    assert metadata.kv_lens.tolist() == lens

    assert builder.build(replace(batch, host_query_lens=None)).chunks == metadata.chunks
    batch.seq_lens.add_(batch.seq_lens.sign())
    builder.advance(metadata)
    assert metadata.kv_lens.tolist() == [length + 1 if length else 0 for length in lens]


def test_uniform_batch_metadata_is_views_of_batch():
    spec = make_spec(num_q_heads=4, num_kv_heads=1, head_dim=576, page_size=64)
    batch = replace(ragged(), uniform=True, num_tokens=15)
    metadata = FlashMlaBuilder(spec, CPU, max_reqs=3, max_tokens=15, max_seq_len=128).build(batch)
    assert metadata.chunks == () and metadata.kv_lens is batch.seq_lens


def test_chunked_uniform_build_needs_no_sync(monkeypatch):
    monkeypatch.setattr(FlashMlaBuilder, "_MAX_TOKENS", 3)
    spec = make_spec(num_q_heads=4, num_kv_heads=1, head_dim=576, page_size=64)
    builder, found = FlashMlaBuilder(spec, CPU, max_reqs=3, max_tokens=15, max_seq_len=128), []
    batch = replace(ragged(), uniform=True, num_tokens=15, host_query_lens=None)
    runtime_for(CPU).capture(lambda: found.append(builder.build(batch)))
    spans = [(start, end) for row in (0, 5, 10) for start, end in ((row, row + 3), (row + 3, row + 5))]
    assert [chunk[1:3] for chunk in found[0].chunks] == spans
