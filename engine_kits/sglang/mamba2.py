"""The backend for Mamba2's state space duality, such as NemotronH's."""

from __future__ import annotations

from typing import Any

from attn_backends import AttentionBackend
from engine_kits.hash_recurrence import Slots
from engine_kits.sglang.linear_attention import linear_backend


def backend() -> type[AttentionBackend]:
    return linear_backend("Mamba2AttnBackend", "ssd", _make, extend)


def _make(runner: Any) -> Any:
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend

    return Mamba2AttnBackend(runner)


def extend(metadata: Any, batch: Any, tokens: list[int], slots: Slots) -> None:
    """Stand in for the kernels of `MambaMixer2.forward` for prompts."""
    mixed = metadata.mixed_metadata
    held, starts = metadata.mamba_cache_indices[: metadata.num_prefills], metadata.query_start_loc
    known = mixed.has_initial_states
    slots.slide(held, starts, tokens, known)
    slots.run(held, starts, tokens, known & mixed.prep_initial_states)
