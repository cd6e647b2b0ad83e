"""The drafts that are trained, as they are before it."""

from __future__ import annotations

from typing import Any

import torch

from spec_decode.models import EagleDraft, LlamaTarget, ModelConfig
from spec_decode.models.checkpoints.store import RandomStore
from spec_decode.models.dflash import DFlash, load

Draft = EagleDraft | DFlash

_QUERY_KEY_NORM = "layers.0.self_attn.q_norm.weight"
"""Layers have the norms of query and key that published drafts have, where a checkpoint holds this tensor."""


def make_draft(config: ModelConfig | dict[str, Any], target: LlamaTarget, device: torch.device) -> Draft:
    """A draft of random numbers, fp32: an EAGLE draft, or a block draft by what its config.json is to say.

    Raises CheckpointError for a config.json that fits no block draft of this target, and ValueError for a block draft
    whose attention is not what `BlockAttention` trains.
    """
    if isinstance(config, ModelConfig):
        return EagleDraft(config, target).to(device)
    draft = load(RandomStore(config, [_QUERY_KEY_NORM], device), target, dtype=torch.float32, device=device)
    if any(draft.config.windows) or any(draft.config.causal or ()):
        raise ValueError(
            f"blocks are trained without windows and causality, got windows {draft.config.windows} and causal "
            f"{draft.config.causal}; the draft was not made. Leave them out of its config."
        )
    return draft.train().requires_grad_(True)
