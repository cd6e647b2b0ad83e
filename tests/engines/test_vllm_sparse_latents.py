"""Drafts over sparse latents inside vLLM 0.33's own classes: DeepSeek-V3.2's, whose indexer has separate metadata.

No engine, model or GPU, and stand-ins for FlashMLA and DeepGEMM. See vllm_runner.py for what they need.
"""

from __future__ import annotations

import pytest
import torch

from tests.engines import vllm_sparse
from tests.engines.vllm_draft_loop import DraftLoop
from tests.engines.vllm_runner import DIM, NEEDS_VLLM, PAGE, SPARSE, TOKENS, select
from tests.engines.vllm_sparse import CACHES, SparseRunner
from tests.factories import make_spec

pytestmark = NEEDS_VLLM


@pytest.mark.parametrize(("dtype", "separate", "native"), [*((*each, False) for each in CACHES), (*CACHES[0], True)])
def test_speculator_replays_sparse_draft_over_new_batches(dtype, separate, native, monkeypatch):
    vllm_sparse.install(monkeypatch, native=native, separate=separate)
    loop = DraftLoop(SparseRunner(dtype))
    assert loop.speculator.supports_decode_metadata_update
    loop.assert_right()


def test_vllm_sparse_group_rebuilds_but_indexer_updates(monkeypatch):
    vllm_sparse.install(monkeypatch)
    runner = SparseRunner(name="FLASHMLA_SPARSE")
    assert [group.supports_draft_decode_metadata_update for group in runner.groups] == [False, True]


@pytest.mark.parametrize("native", [False, True], ids=["flat", "native"])
def test_indexer_without_update_attends_wrongly(native, monkeypatch):
    """The control of the loop: what vllm#54369 proposed for vLLM's indexer."""
    vllm_sparse.install(monkeypatch, native=native)
    runner = SparseRunner()
    theirs = type(runner.indexer.get_metadata_builder())
    monkeypatch.setattr(theirs, "update_draft_decode_metadata", lambda self, metadata: None)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        DraftLoop(runner).assert_right()


@pytest.mark.parametrize("refreshed", [True, False])
def test_verify_build_needs_refresh_before_replay(refreshed, monkeypatch):
    """Its build writes the map from tokens to requests where the graph reads it."""
    vllm_sparse.install(monkeypatch)
    runner = SparseRunner()
    if not refreshed:
        monkeypatch.setattr(type(runner.builder), "update_draft_decode_metadata", lambda self, metadata: None)
    loop = DraftLoop(runner)
    starts = torch.arange(runner.ROWS + 1, dtype=torch.int32) * (1 + TOKENS)
    tokens = int(starts[-1])
    shape = {"num_actual_tokens": tokens, "max_query_len": 1 + TOKENS, "slot_mapping": torch.zeros(tokens).long()}
    runner.builder.build(0, runner.common().replace(query_start_loc=starts, query_start_loc_cpu=starts, **shape))
    if refreshed:
        loop.assert_right()
    else:
        with pytest.raises(AssertionError, match="Tensor-likes are not close"):
            loop.assert_right()


def test_a_cache_on_the_host_is_refused(monkeypatch):
    from engine_kits.vllm.config import config_of

    config = config_of(make_spec(head_dim=DIM, page_size=PAGE), TOKENS)
    monkeypatch.setattr(config.attention_config, "hisparse_config", object())
    with pytest.raises(ValueError, match="HiSparse keeps the cache on the host"):
        select(SPARSE)
