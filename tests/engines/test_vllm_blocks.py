"""Blocks of draft tokens, which are not causal, inside vLLM 0.33's own classes: DFlash and similar drafts.

No engine, model or GPU, and stand-ins for FlashInfer and FlashAttention-3. See test_vllm_inside.py for what they need.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attn_backends import Feature
from builders import BatchError
from scripts import vllm_arm, vllm_figures
from spec_decode.graphs import runtime_for
from tests.engines import vllm_flashinfer
from tests.engines.vllm_draft_loop import speculator_of
from tests.engines.vllm_runner import (
    DIM,
    HEADS,
    KV_HEADS,
    LATENT,
    NEEDS_VLLM,
    PAGE,
    PAGED,
    TOKENS,
    WIDTH,
    assert_attends,
    backend_of,
    default_dtype,
    make_runner,
    select,
    weights_left,
)
from tests.factories import CPU

pytestmark = NEEDS_VLLM
BLOCK = 1 + TOKENS
"""Query tokens a request of DFlash and DFlash2: the last token and a mask for each draft token. DSpark has one less."""
FLASHINFER = PAGED[1]
LENS = ([5, 150, 33, 16, 90, 7, 12, 64], [40, 6, 190])


def runner_of(name, query_len=BLOCK, **options):
    """A group of layers of a block draft."""
    return make_runner(name, query_len, causal=False, **options)


def dflash(runner):
    """vLLM's speculator of block drafts, as far as it decides how the draft runs."""
    from vllm.v1.worker.gpu.attn_utils import AttentionCGSupportInfo
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    config = replace(runner.config, attention_config=replace(runner.config.attention_config, use_non_causal=True))
    support = type(runner.builder).get_cudagraph_support(config, runner.group.kv_cache_spec)
    narrowed = AttentionCGSupportInfo().narrow(support, runner.group.backend.get_name())
    own = {"vllm_config": config, "num_query_per_req": runner.query_len, "attn_cg_support": narrowed}
    return speculator_of(DFlashSpeculator, runner, **own)


class BlockRound:
    """A round of DFlash from its preparation to its attention, by vLLM's own code: captured once, then replayed."""

    def __init__(self, runner):
        from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import _prepare_dflash_inputs_to_capture

        self.runner, rows = runner, runner.ROWS
        self.tokens = rows * runner.query_len
        self.speculator = speculator = dflash(runner)
        groups = (speculator.block_tables, speculator.attn_groups, speculator.kv_cache_config, speculator.max_model_len)
        state = _prepare_dflash_inputs_to_capture(
            rows, self.tokens, runner.inputs, *groups, skip_attn=False, causal={0: False}
        )
        self.metadata = state.attn_metadata[runner.layer_name]
        self.query = torch.zeros(self.tokens, HEADS, runner.head_dim, dtype=torch.bfloat16)
        self.out = torch.zeros(self.tokens, HEADS, runner.value_dim, dtype=torch.bfloat16)

        def forward():
            self.speculator._update_draft_decode_metadata(state.attn_metadata, rows)
            self.out.copy_(runner.attend(self.metadata, self.query))

        forward()  # vLLM warms a graph up with its own inputs
        self.graph = runtime_for(CPU).capture(forward)

    def draft(self, lens, seed):
        """For requests of these lengths, of whose last round one token was rejected; their blocks end at `lens`."""
        from vllm.v1.worker.gpu.spec_decode.dflash.speculator import prepare_dflash_inputs

        runner, rows, length = self.runner, self.runner.ROWS, self.runner.query_len
        runner.table.zero_()
        runner.fill(lens, seed)
        # Two tokens were verified; the second is the one that was rejected.
        ends = torch.tensor([each - length - 1 for each in lens])
        batch = SimpleNamespace(
            num_reqs=len(lens),
            num_scheduled_tokens=np.full(len(lens), 2, dtype=np.int32),
            positions=torch.stack([ends, ends + 1], 1).flatten(),
            query_start_loc=torch.arange(len(lens) + 1, dtype=torch.int32) * 2,
            idx_mapping=torch.arange(len(lens)),
        )
        context_and_samples = (torch.zeros(rows * length, dtype=torch.int64) for _ in range(5))
        one, zero, any_token = torch.ones(rows, dtype=torch.int32), torch.zeros(rows), torch.full((rows,), 7)
        prepare_dflash_inputs(
            runner.inputs, runner.slots, *context_and_samples, zero.clone(), zero.long(),
            batch, num_sampled=one, num_rejected=one, last_sampled=any_token, next_prefill_tokens=any_token,
            input_temperature=zero, input_seeds=zero.long(), block_table=runner.table, block_size=runner.page,
            cp_rank=0, cp_size=1, cp_interleave=1, parallel_drafting_token_id=3, num_query_per_req=length,
            num_speculative_steps=length - 1, max_num_reqs=rows, max_num_tokens=self.tokens,
            max_model_len=self.speculator.max_model_len,
        )  # fmt: skip
        assert runner.seq_lens.tolist() == [*lens, *[0] * (rows - len(lens))]
        self.query.copy_(torch.randn(self.query.shape, generator=torch.Generator().manual_seed(seed)))
        self.graph.replay()
        return self.out[: len(lens) * length].double()


@pytest.mark.parametrize("window", [None, BLOCK, 40], ids=["all", "a block", "40"])
@pytest.mark.parametrize("query_len", [BLOCK, TOKENS], ids=["dflash", "dspark"])
@pytest.mark.parametrize("name", PAGED)
def test_block_sees_later_tokens_and_its_window(name, query_len, window):
    runner = runner_of(name, query_len, window=window)
    for seed, lens in enumerate(LENS):
        runner.fill(lens, seed)
        assert_attends(runner, runner.group.build_metadata(runner.common()), lens)


@pytest.mark.parametrize(
    ("name", "window"),
    [*((name, None) for name in LATENT), *((name, window) for name in PAGED for window in (None, BLOCK, 40))],
)
def test_speculator_replays_block_over_new_batches(name, window):
    drafted = BlockRound(runner_of(name, window=window))
    planned = len(vllm_flashinfer.HOST_PLANS)
    for seed, lens in enumerate(LENS):
        lens = [length + BLOCK for length in lens if length + BLOCK <= WIDTH * PAGE]
        found = drafted.draft(lens, seed + 1)
        torch.testing.assert_close(found, drafted.runner.truth(drafted.query, lens), atol=2e-2, rtol=2e-2)
    assert len(vllm_flashinfer.HOST_PLANS) == planned


@pytest.mark.parametrize("name", (*PAGED, *LATENT))
def test_speculator_runs_block_draft_as_one_graph(name, monkeypatch):
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.spec_decode.dflash import speculator as theirs

    runner, modes = runner_of(name), []
    monkeypatch.setattr(theirs, "DFlashCudaGraphManager", lambda config, device, mode, **more: modes.append(mode))
    speculator = dflash(runner)
    speculator.init_cudagraph_manager(CUDAGraphMode.FULL_AND_PIECEWISE)
    assert modes == [CUDAGraphMode.FULL_DECODE_ONLY] and speculator.supports_decode_metadata_update


def test_vllm_flashinfer_lacks_block_graph_without_xqa(monkeypatch):
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends import flashinfer as theirs

    monkeypatch.setattr(theirs, "can_use_trtllm_attention", lambda *args, **options: False)
    runner = runner_of(FLASHINFER)
    config = replace(runner.config, attention_config=replace(runner.config.attention_config, use_non_causal=True))
    support = theirs.FlashInferMetadataBuilder.get_cudagraph_support(config, runner.group.kv_cache_spec)
    assert support is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


@pytest.mark.parametrize("name", [name for name in (*PAGED, *LATENT) if name != FLASHINFER])
def test_kernels_without_blocks_are_rejected_with_both_reasons(name, monkeypatch):
    """Its capabilities decide: those of FlashAttention-3 are its provider's."""
    without_blocks(monkeypatch, backend_of(name))
    ours = "" if name in LATENT else ".*has no non_causal"
    with pytest.raises(ValueError, match=f"non-causal attention not supported{ours}"):
        select(name, use_non_causal=True)


def without_blocks(monkeypatch, backend):
    ours = backend.ours
    features = ours.capabilities.features - {Feature.NON_CAUSAL}
    lesser = type(type(ours).__name__, (type(ours),), {"capabilities": replace(ours.capabilities, features=features)})
    for part in (backend, backend.builder, backend.impl):
        monkeypatch.setattr(part, "ours", lesser())


@pytest.mark.parametrize("name", [name for name in (*PAGED, *LATENT) if name != FLASHINFER])
def test_kernels_without_blocks_reject_non_causal_build(name, monkeypatch):
    runner = runner_of(name)
    without_blocks(monkeypatch, runner.group.backend)
    runner.remake()
    runner.fill([150, 33])
    with pytest.raises(BatchError, match="is causal only, got a batch with causal=False"):
        runner.builder.build(0, runner.common())
    runner.causal = True
    assert runner.builder.build(0, runner.common())


@pytest.mark.parametrize("name", (*PAGED, *LATENT))
def test_requests_of_mixed_causality_are_rejected(name):
    runner = runner_of(name)
    runner.fill([150, 33])
    with pytest.raises(BatchError, match="one causal flag for all requests of a batch, got a tensor"):
        runner.builder.build(0, runner.common().replace(causal=torch.tensor([True] * runner.ROWS)))


@pytest.mark.parametrize("name", PAGED)
def test_block_longer_than_its_window_is_rejected(name):
    runner = runner_of(name, window=BLOCK - 1)
    runner.fill([150, 33])
    with pytest.raises(BatchError, match=f"no longer than the sliding window of {BLOCK - 1}, got {BLOCK}"):
        runner.builder.build(0, runner.common())
    runner.causal = True
    assert_attends(runner, runner.builder.build(0, runner.common()), [150, 33])


@pytest.mark.parametrize("name", [name for name in PAGED if name != FLASHINFER])
def test_block_longer_than_any_layer_window_is_rejected(name):
    runner = runner_of(name)
    layers = {"whole": runner.layer, "windowed": runner_of(name, window=BLOCK - 1).layer}
    runner.config.compilation_config.static_forward_context = layers
    runner.group.layer_names = [*layers]
    runner.remake()
    runner.fill([150, 33])
    with pytest.raises(BatchError, match=f"no longer than the sliding window of {BLOCK - 1}, got {BLOCK}"):
        runner.builder.build(0, runner.common())


@pytest.mark.parametrize("name", (*PAGED, *LATENT))
def test_group_metadata_states_causality_of_batch(name):
    """vLLM's first runner asks each layer's for it."""
    runner = runner_of(name)
    runner.fill([150, 33])
    for causal in (False, True, False):
        runner.causal = causal
        metadata = runner.builder.build(0, runner.common())
        assert metadata.causal is causal
        query = torch.randn(runner.ROWS * BLOCK, HEADS, runner.head_dim).bfloat16()
        found = runner.attend(metadata, query)[: 2 * BLOCK].double()
        torch.testing.assert_close(found, runner.truth(query, [150, 33]), atol=2e-2, rtol=2e-2)


def test_block_without_graph_is_planned_by_vllm():
    runner = runner_of(FLASHINFER)
    runner.builder._decode_cudagraph_max_bs = 2 * BLOCK - 1
    runner.fill([20, 150])
    for length in (150, 160):
        runner.fill([20, length])
        metadata = runner.builder.build(0, runner.common(rows=2))
        assert metadata.plan is None and metadata.num_prefills == 2
        assert_attends(runner, metadata, [20, length], rows=2)
    runner.fill([20, 170])
    runner.builder.update_draft_decode_metadata(metadata)
    assert_attends(runner, metadata, [20, 170], rows=2)


def test_blocks_use_vllm_workspace():
    runner = runner_of(FLASHINFER)
    runner.builder.set_workspace_buffer(torch.zeros(200 << 20, dtype=torch.uint8))
    runner.fill([20, 150])
    wrapper = runner.builder.build(0, runner.common()).prefill.wrapper
    assert wrapper._float_workspace_buffer is runner.builder._get_workspace_buffer()


def test_block_plan_uses_layer_scale_and_cache_layout(monkeypatch):
    runner = runner_of(FLASHINFER)
    runner.builder.logits_soft_cap, runner.builder.sm_scale = 5.0, 0.2
    monkeypatch.setattr(runner.config.cache_config, "kv_cache_layout", "LBHNC")
    runner.fill([20, 150])
    wrapper = runner.builder.build(0, runner.common()).prefill.wrapper
    assert (wrapper._soft_cap, wrapper._sm_scale, wrapper.kv_layout) == (5.0, 0.2, "HND")


@pytest.fixture
def tiny(one_process, monkeypatch):
    monkeypatch.setitem(vllm_arm.SIZES, "qwen3-tiny", (64, 96, HEADS, KV_HEADS, DIM, 128, 8))


def config_of_arm(kind):
    """What vLLM makes of an arm of the figures, in a tiny size."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import qwen3, qwen3_dflash, qwen3_dflash2
    from vllm.model_executor.models.registry import ModelRegistry

    models = (qwen3.Qwen3ForCausalLM, qwen3_dflash.DFlashQwen3ForCausalLM, qwen3_dflash2.DFlash2Qwen3ForCausalLM)
    for name, model in zip(("Qwen3ForCausalLM", "DFlashDraftModel", "DFlash2DraftModel"), models, strict=True):
        ModelRegistry.register_model(name, model)
    arm = vllm_arm.Arm(PAGED[0], vllm_figures.ROUNDS[kind][0], "qwen3-tiny", kind=kind)
    return EngineArgs(**vllm_arm.engine_options(arm)).create_engine_config()


def draft_of(config):
    """The draft as vLLM's loader of block drafts makes it, without its weights."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models.qwen3_dflash import dflash_has_any_non_causal

    draft = config.speculative_config
    attention = replace(
        config.attention_config,
        use_non_causal=dflash_has_any_non_causal(draft.draft_model_config.hf_config),
        backend=draft.attention_backend,
    )
    config = replace(config, attention_config=attention)
    with set_current_vllm_config(config), default_dtype(torch.bfloat16):
        return initialize_model(config, model_config=draft.draft_model_config, prefix="draft")


@pytest.mark.parametrize(("kind", "window"), [("dflash", None), ("dflash2", 2048)])
def test_vllm_makes_block_drafts_over_our_backend(kind, window, tiny):
    model = draft_of(config_of_arm(kind))
    layers = [layer.self_attn for layer in model.model.layers]
    assert {(layer.sliding_window, layer.causal) for layer in layers} == {(window, False)}
    assert {layer.attn.impl.spec(PAGE).sliding_window for layer in layers} == {window}

    shared = {"model.embed_tokens.weight", "lm_head.weight"}
    assert weights_left(model, is_draft=True) - shared <= {"model.mask_embedding"}


def test_vllm_rejects_block_draft_over_causal_kernels(tiny, monkeypatch):
    config = config_of_arm("dflash")
    without_blocks(monkeypatch, backend_of(PAGED[0]))
    with pytest.raises(ValueError, match=r"not valid for this configuration.*non-causal attention not supported"):
        draft_of(config)
