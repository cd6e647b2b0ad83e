"""Drafts over dense latents inside vLLM 0.33's own classes: multi-token prediction, token by token.

No engine, model or GPU, and stand-ins for FlashAttention-3 and FlashMLA. See test_vllm_inside.py for what they need.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from builders import AdvanceLevel, AdvanceSupport
from scripts import vllm_arm
from tests import flashmla_stand_in
from tests.engines.vllm_draft_loop import LENS, DraftLoop
from tests.engines.vllm_runner import (
    HEADS,
    LATENT,
    NEEDS_VLLM,
    TOKENS,
    LatentRunner,
    assert_attends,
    backend_of,
    default_dtype,
    select,
    weights_left,
)

pytestmark = NEEDS_VLLM
_, FLASH_ATTN3, FLASHMLA = LATENT
VLLM_FLASHMLA = "vllm.third_party.flashmla.flash_mla_interface"


def test_draft_loop_with_stale_schedule_attends_wrongly(monkeypatch):
    """As vLLM's FLASHMLA would if it only claimed the update: the schedule of the warm-up stays."""
    kept = flashmla_stand_in.FlashMLASchedMeta()
    monkeypatch.setattr(kernels_of(FLASHMLA, "flashmla"), "FlashMLASchedMeta", lambda: kept)
    loop = DraftLoop(LatentRunner(FLASHMLA))
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        loop.assert_right()


def test_flashmla_accepts_calls_through_vllm_python(monkeypatch):
    """Its checks of what belongs together too; only the compiled operation is the stand-in's."""
    monkeypatch.setitem(sys.modules, "vllm._flashmla_C", ModuleType("vllm._flashmla_C"))
    monkeypatch.setattr(torch.ops, "_flashmla_C", SimpleNamespace(dense_decode_fwd=flashmla_stand_in.dense_decode_fwd))
    theirs = importlib.import_module(VLLM_FLASHMLA)
    del sys.modules[VLLM_FLASHMLA]  # which another test may look for, without kernels
    for entry in ("FlashMLASchedMeta", "flash_mla_with_kvcache"):
        monkeypatch.setattr(kernels_of(FLASHMLA, "flashmla"), entry, getattr(theirs, entry))
    DraftLoop(LatentRunner(FLASHMLA)).assert_right()


def kernels_of(name, attribute):
    """A global of the module of our backend that vLLM knows by a name."""
    return type(backend_of(name).ours).__mro__[1].forward.__globals__[attribute]


@pytest.mark.parametrize("causal", [True, False])
def test_rows_split_over_calls_follow_their_causality(causal, monkeypatch):
    monkeypatch.setattr(backend_of(FLASHMLA).ours.builder, "_MAX_TOKENS", 2)
    runner = LatentRunner(FLASHMLA, 1 + TOKENS, causal=causal)
    for seed, lens in enumerate(LENS):
        runner.fill(lens, seed)
        metadata = runner.group.build_metadata(runner.common())
        assert_attends(runner, metadata, lens)
        runner.seq_lens.add_(runner.seq_lens.sign())
        runner.group.update_draft_decode_metadata({runner.layer_name: metadata})
        assert_attends(runner, metadata, [length + 1 for length in lens])


def test_latent_layer_returns_no_lse():
    runner = LatentRunner(LATENT[0])
    runner.fill([5, 150])
    metadata = runner.group.build_metadata(runner.common())
    query = torch.zeros(runner.ROWS, HEADS, runner.head_dim, dtype=torch.bfloat16)
    assert runner.impl.forward_mqa(query, runner.cache, metadata, None)[1] is None


@pytest.mark.parametrize(
    ("extras", "reason"),
    [
        ({"alibi_slopes": [0.5]}, "has no alibi_slopes"),
        ({"sliding_window": 128}, "has no sliding_window"),
        ({"logits_soft_cap": 5.0}, "has no logits_soft_cap"),
        ({"attn_type": "encoder_only"}, "has no attn_type, the layer has 'encoder_only'"),
        ({"q_pad_num_heads": 2 * HEADS}, "has no q_pad_num_heads"),
        ({"kv_lora_rank": 256}, "value_dim must be 512, got 256"),
    ],
)
def test_unsupported_latent_layer_option_is_rejected_at_creation(extras, reason):
    with pytest.raises(ValueError, match=f"{reason}.*vLLM was not started"):
        LatentRunner(FLASH_ATTN3, **extras)


def test_build_without_latent_kernels_is_rejected_with_reason(monkeypatch):
    monkeypatch.setattr(kernels_of(FLASH_ATTN3, "PROVIDER"), "latent_query", None)
    with pytest.raises(ValueError, match=r"not valid for this configuration.*values wider than keys"):
        select(FLASH_ATTN3)


def test_vllm_rebuilds_over_divided_contexts(monkeypatch):
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

    make = MLACommonMetadataBuilder.__init__

    def divided(self, *args):
        make(self, *args)
        self.dcp_world_size = 2

    monkeypatch.setattr(MLACommonMetadataBuilder, "__init__", divided)
    assert not LatentRunner(FLASHMLA).group.supports_draft_decode_metadata_update


def test_vllm_rebuilds_if_builder_claims_no_advance(monkeypatch):
    rebuilt = AdvanceSupport(AdvanceLevel.REBUILD, "it plans on the host")
    monkeypatch.setattr(backend_of(FLASHMLA).ours.builder, "advance_support", classmethod(lambda *given: rebuilt))
    assert not LatentRunner(FLASHMLA).group.supports_draft_decode_metadata_update


def test_vllm_loads_every_deepseek_and_mtp_weight(one_process, vllm_kernels, monkeypatch):
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.fused_moe.runner import shared_experts
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import deepseek_mtp, deepseek_v2
    from vllm.model_executor.models.registry import ModelRegistry

    monkeypatch.setitem(vllm_arm.SIZES, "deepseek-tiny", (64, 96, HEADS, HEADS, 64, 128, 4))
    monkeypatch.setitem(vllm_arm.EXPERT_WIDTH, "deepseek-tiny", 16)
    monkeypatch.setattr(shared_experts, "aux_stream", lambda: None)
    ModelRegistry.register_model("DeepseekV3ForCausalLM", deepseek_v2.DeepseekV3ForCausalLM)
    ModelRegistry.register_model("DeepSeekMTPModel", deepseek_mtp.DeepSeekMTP)
    arm = vllm_arm.Arm(LATENT[0], 3, "deepseek-tiny", kind="mtp")
    config = EngineArgs(**vllm_arm.engine_options(arm)).create_engine_config()
    draft = config.speculative_config
    shared = {"model.embed_tokens.weight", "model.layers.4.shared_head.head.weight"}
    for is_draft, of, model_config in (
        (False, config, config.model_config),
        (True, draft.apply_draft_overrides(config), draft.draft_model_config),
    ):
        with set_current_vllm_config(of), default_dtype(torch.bfloat16):
            model = initialize_model(of, model_config=model_config)
        assert weights_left(model, is_draft=is_draft) == (shared if is_draft else set())
