"""The backend for gated delta rules, such as Qwen3-Next's."""

from __future__ import annotations

from typing import Any

from attn_backends import AttentionBackend
from engine_kits.hash_recurrence import Slots
from engine_kits.sglang.linear_attention import linear_backend


def backend() -> type[AttentionBackend]:
    return linear_backend("GDNAttnBackend", "gated_delta", _make, extend)


def _make(runner: Any) -> Any:
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

    return GDNAttnBackend(runner)


def extend(metadata: Any, batch: Any, tokens: list[int], slots: Slots) -> None:
    """Stand in for the kernels of `GDNAttnBackend.forward_extend` for prompts."""
    held, starts = metadata.mamba_cache_indices, metadata.query_start_loc
    slots.slide(held, starts, tokens, batch.extend_prefix_lens > 0)
    slots.run(held, starts, tokens)
