"""Checks of vLLM's configuration, before it loads weights: none of our choices stays without effect in silence."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from attn_backends.engines.vllm.compat import EngineArgs
from attn_backends.engines.vllm.hooks import wrap
from attn_backends.engines.vllm.names import DRAFT_HEAD, PLAIN, ROUNDED

OWN_MTP = ("Gemma4MTPModel", "NemotronHMTPModel", "Qwen4ExpMTP", "Step3p5MTP")
"""MTP drafts that have a quantization of their own; all others have the target's."""
TARGETS_EAGLE = (
    "EagleDeepSeekMTPModel", "EagleLlama4ForCausalLM", "EagleMiniCPMForCausalLM", "EagleMistralLarge3ForCausalLM",
)  # fmt: skip
"""EAGLE drafts that have the target's."""


def install() -> None:
    """Check each configuration that vLLM makes of its arguments."""
    wrap(EngineArgs, "create_engine_config", _checked, lambda arguments: None)


def _checked(_: None, make: Callable[[], Any], __: Any) -> Any:
    config = make()
    require_effect(config)
    draft = config.speculative_config
    for name in {config.model_config.quantization, draft and draft.quantization} & {PLAIN, ROUNDED}:
        from attn_backends.engines.vllm import linear_methods

        linear_methods.require_served(config, name)
    if value := os.environ.get(DRAFT_HEAD):
        from attn_backends.engines.vllm.draft_heads import require_served
        from attn_backends.engines.vllm.head_choice import HeadChoice

        require_served(config, HeadChoice.of(value))
    return config


def require_effect(config: Any) -> None:
    """Raise ValueError if a VllmConfig names a quantization of ours for a draft that has the target's."""
    draft, target = config.speculative_config, config.model_config.quantization
    if draft is None or draft.quantization not in (PLAIN, ROUNDED) or draft.quantization == target:
        return
    architecture = draft.draft_model_config.architecture
    if has_targets(draft.method, architecture):
        raise ValueError(
            f"quantization {draft.quantization!r} in --speculative-config has no effect on {architecture}, so vLLM was "
            f"not started: that draft has the target's, which is {target!r}. Leave it out, or choose it with "
            "--quantization."
        )


def has_targets(method: str, architecture: str) -> bool:
    """Whether vLLM gives such a draft the target's quantization."""
    return architecture in TARGETS_EAGLE or (method == "mtp" and architecture not in OWN_MTP)
