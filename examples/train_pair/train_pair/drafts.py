"""Create untrained drafts."""

from __future__ import annotations

from typing import Any

import torch

from spec_decode.models import EagleDraft, LlamaTarget, ModelConfig
from spec_decode.models.checkpoints.store import RandomStore
from spec_decode.models.dflash import DFlash, load

Draft = EagleDraft | DFlash

_QUERY_KEY_NORM = "layers.0.self_attn.q_norm.weight"
"""RandomStore lists this tensor so the layers get query and key norms, as in published drafts."""


def make_draft(config: ModelConfig | dict[str, Any], target: LlamaTarget, device: torch.device) -> Draft:
    """Create a draft with random fp32 weights: an EAGLE draft, or a block draft described by its future config.json.

    Raises CheckpointError for a config.json that does not fit the target, and ValueError for a block draft with
    attention that `BlockAttention` cannot train.
    """
    if isinstance(config, ModelConfig):
        return EagleDraft(config, target).to(device)
    draft = load(RandomStore(config, [_QUERY_KEY_NORM], device), target, dtype=torch.float32, device=device)
    if any(draft.config.windows) or any(draft.config.causal or ()):
        raise ValueError(
            f"blocks are trained without windows and causality, got windows {draft.config.windows} and causal "
            f"{draft.config.causal}. Leave them out of its config."
        )
    return draft.train().requires_grad_(True)
