"""The models to train, and their hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from spec_decode.models import LatentConfig, ModelConfig

TARGET = ModelConfig(
    vocab_size=256, hidden_size=256, intermediate_size=688, num_layers=4,
    num_q_heads=4, num_kv_heads=2, head_dim=64, max_positions=2048,
)  # fmt: skip
DRAFT = replace(TARGET, num_layers=1)
FURTHER_DRAFTS: dict[str, ModelConfig | dict[str, Any]] = {
    # The dims and the window of DeepSeek-V4's layers, so kernels for those layers support it.
    "latent_draft": replace(
        DRAFT, num_kv_heads=1, head_dim=512, sliding_window=128,
        latent=LatentConfig(rope_dim=64, q_rank=128, out_rank=128),
    ),
    "block_draft": {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": TARGET.vocab_size,
        "hidden_size": TARGET.hidden_size, "intermediate_size": TARGET.intermediate_size, "num_hidden_layers": 3,
        "num_attention_heads": TARGET.num_q_heads, "num_key_value_heads": TARGET.num_kv_heads,
        "head_dim": TARGET.head_dim, "hidden_act": "silu", "max_position_embeddings": TARGET.max_positions,
        "rms_norm_eps": TARGET.norm_eps, "rope_theta": TARGET.rope_theta, "dtype": "bfloat16",
        # The next token and 7 masks. No utf-8 text holds byte 255.
        "block_size": 8, "num_target_layers": TARGET.num_layers,
        "dflash_config": {"mask_token_id": 255, "target_layer_ids": [TARGET.num_layers - 1]},
    },
}  # fmt: skip
"""Further drafts for the shipped target, by name. Training one leaves the target unchanged.

A block draft is described by its config.json, in published DFlash's terms.
"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The hyperparameters of a run."""

    seed: int = 0
    target_steps: int = 1000
    draft_steps: int = 5000
    batch: int = 32
    window: int = 512
    target_lr: float = 1.5e-3
    target_decay: float = 1.0
    byte_noise: float = 0.2
    draft_lr: float = 1.5e-3
    draft_decay: float = 0.05
    written: int = 4096
    unroll: int = 4
    step_weight: float = 0.9
    hidden_weight: float = 0.1
    blocks: int = 64
    place_weight: float = 0.8
    prompts: int = 32
    rounds: int = 32
