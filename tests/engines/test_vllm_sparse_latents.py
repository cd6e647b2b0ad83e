"""Drafts over sparse latents inside vLLM 0.33's own classes: DeepSeek-V3.2's, whose indexer has metadata of its own.

No engine, model or GPU, and stand-ins for FlashMLA and DeepGEMM. See vllm_runner.py for what they need.
"""

from __future__ import annotations

import pytest
import torch

from tests.engines import vllm_sparse
from tests.engines.vllm_draft_loop import DraftLoop
from tests.engines.vllm_runner import DIM, NEEDS_VLLM, PAGE, TOKENS, backend_of, select
from tests.engines.vllm_sparse import CACHES, FP8, SPARSE, SPARSE_LAYER, SparseRunner
from tests.factories import make_spec

pytestmark = NEEDS_VLLM


@pytest.mark.parametrize("native", [False, True], ids=["flat", "native"])
@pytest.mark.parametrize(("dtype", "separate"), CACHES)
def test_vllms_speculator_replays_a_sparse_draft_over_batches_that_its_graph_never_saw(
    dtype, separate, native, monkeypatch
):
    vllm_sparse.install(monkeypatch, native=native, separate=separate)
    loop = DraftLoop(SparseRunner(dtype))
    assert loop.speculator.supports_decode_metadata_update
    loop.assert_right()


def test_vllms_own_name_does_not_fuse_and_its_indexer_is_not_why(monkeypatch):
    vllm_sparse.install(monkeypatch)
    runner = SparseRunner(name="FLASHMLA_SPARSE")
    assert [group.supports_draft_decode_metadata_update for group in runner.groups] == [False, True]


@pytest.mark.parametrize("native", [False, True], ids=["flat", "native"])
def test_a_draft_whose_indexer_updates_nothing_attends_to_other_tokens(native, monkeypatch):
    """The control of the loop: what vllm#54369 proposed for vLLM's indexer."""
    vllm_sparse.install(monkeypatch, native=native)
    runner = SparseRunner()
    theirs = type(runner.indexer.get_metadata_builder())
    monkeypatch.setattr(theirs, "update_draft_decode_metadata", lambda self, metadata: None)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        DraftLoop(runner).assert_right()


@pytest.mark.parametrize("refreshed", [True, False])
def test_a_batch_of_several_tokens_a_request_does_not_reach_the_graph(refreshed, monkeypatch):
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


def test_vllm_selects_it_for_sparse_latents_alone():
    assert select(SPARSE, **SPARSE_LAYER) == "engines.vllm.v0_33.sparse.InGraphFlashMlaSparse"
    assert select(SPARSE, **SPARSE_LAYER, kv_cache_dtype=FP8)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_sparse": False}, "non-sparse not supported"),
        ({"use_mla": False}, "non-MLA not supported"),
        ({"head_size": 512}, "head_size not supported"),
        ({"dtype": torch.float16}, "dtype not supported"),
        ({"block_size": 32}, "block_size not supported"),
        ({"kv_cache_dtype": "fp8"}, "must be fp8_ds_mla, got fp8; use --kv-cache-dtype fp8_ds_mla"),
        ({"kv_cache_dtype": "nvfp4_ds_mla"}, "must be fp8_ds_mla, got nvfp4_ds_mla"),
        ({"use_dcp": True}, "DCP not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"use_batch_invariant": True}, "batch invariance not supported"),
        ({"use_adaptive_verification": True}, "device-cpu query lens mismatch not supported"),
    ],
)
def test_vllm_shows_the_reason_against_a_sparse_draft(changes, reason):
    with pytest.raises(ValueError, match=f"is not valid for this configuration.*{reason}"):
        select(SPARSE, **{**SPARSE_LAYER, **changes})


def test_a_cache_on_the_host_is_refused(monkeypatch):
    from engines.vllm.conformance.config import config_of

    config = config_of(make_spec(head_dim=DIM, page_size=PAGE), TOKENS)
    monkeypatch.setattr(config.attention_config, "hisparse_config", object())
    with pytest.raises(ValueError, match="HiSparse keeps the cache on the host"):
        select(SPARSE, **SPARSE_LAYER)


@pytest.mark.parametrize(("capability", "served"), [((9, 0), True), ((8, 0), False), ((10, 0), False)])
def test_it_is_offered_on_hopper_alone(capability, served):
    from vllm.platforms.interface import DeviceCapability

    assert backend_of(SPARSE).supports_compute_capability(DeviceCapability(*capability)) is served
