"""vLLM's own hybrid target of the figures, Qwen3.5 with its MTP layer, and our draft backend under it.

No engine, model or GPU. See test_vllm_inside.py for what they need.
"""

from __future__ import annotations

import sys

import torch

from engine_kits.kernels import stand_in_for
from scripts import vllm_arm
from tests.engines.vllm_runner import NEEDS_VLLM, default_dtype, weights_left

pytestmark = NEEDS_VLLM


def test_vllm_loads_every_weight_of_hybrid_target_and_mtp(one_process, vllm_flashinfer, monkeypatch):
    # vLLM's Qwen3.5 can read pictures, whose processors import it.
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    stand_in_for("torchvision")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import qwen3_5, qwen3_5_mtp
    from vllm.model_executor.models.registry import ModelRegistry

    monkeypatch.setitem(vllm_arm.SIZES, "qwen3.5", (64, 96, 4, 2, 256, 128, 4))
    ModelRegistry.register_model("Qwen3_5ForCausalLM", qwen3_5.Qwen3_5ForCausalLM)
    ModelRegistry.register_model("Qwen3_5MTP", qwen3_5_mtp.Qwen3_5MTP)
    arm = vllm_arm.Arm("FLASHINFER_IN_GRAPH", 3, "qwen3.5", 1.8, kind="qwen3.5-mtp")
    config = EngineArgs(**vllm_arm.engine_options(arm)).create_engine_config()
    draft = config.speculative_config
    assert config.cache_config.mamba_cache_mode == "none", "states can be validated"
    for is_draft, of, model_config in (
        (False, config, config.model_config),
        (True, draft.apply_draft_overrides(config), draft.draft_model_config),
    ):
        with set_current_vllm_config(of), default_dtype(torch.bfloat16):
            model = initialize_model(of, model_config=model_config)
        shared = {"lm_head.weight", "model.embed_tokens.weight"}
        assert weights_left(model, is_draft=is_draft) == (shared if is_draft else set())
        attends = model.model.layers[-1].self_attn.attn.get_attn_backend().get_name()
        assert attends == ("FLASHINFER_IN_GRAPH" if is_draft else "FLASH_ATTN")
