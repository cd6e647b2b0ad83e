"""Why a backend of this library cannot decode an SGLang draft, as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import get_parallel


class UnsupportedDraft(ValueError):
    """A draft that a backend does not serve."""

    @classmethod
    def because(cls, name: str, reasons: Sequence[str]) -> UnsupportedDraft:
        return cls(
            f"{name} cannot serve this draft: {'; '.join(dict.fromkeys(reasons))}. Its drafts would be wrong, so "
            "SGLang was not started. Choose one of SGLang's own with --speculative-draft-attention-backend."
        )


def reasons_against(runner: Any, *, topk: int) -> list[str]:
    """List what rules out a runner, regardless of its layers."""
    pool = runner.token_to_kv_pool
    layout = getattr(pool, "kv_cache_layout", "nhd")
    found = {
        f"it drafts chains, --speculative-eagle-topk is {topk}; use 1": topk != 1,
        "it has no latent attention; use a draft with keys and values": bool(runner.use_mla_backend),
        f"it reads SGLang's plain KV cache, this pool is {type(pool).__name__}": type(pool) is not MHATokenToKVPool,
        f"the KV cache must have the draft's dtype, {runner.dtype}, got {pool.dtype}; use --kv-cache-dtype auto": (
            pool.dtype != runner.dtype
        ),
        f"a token's heads must be adjacent, the layout is {layout}; use nhd": layout != "nhd",
        "slots must index the cache, this pool translates them": runner.kv_index_translator.is_translating,
        "it has no decode context parallelism": get_parallel().dcp_enabled,
    }
    return [reason for reason, holds in found.items() if holds]


def layer_reasons(runner: Any, layers: Iterable[Any]) -> list[str]:
    """List what a runner's layers require of attention that no spec can express."""
    chunked = getattr(runner, "attention_chunk_size", None) is not None
    found: dict[str, bool] = {}
    for layer in layers:
        temperature, cap, method = layer.xai_temperature_len, layer.logit_cap, layer.logit_capping_method
        found |= {
            f"layer {layer.layer_id} attends to an encoder's tokens": layer.is_cross_attention,
            f"layer {layer.layer_id} attends within chunks of text": chunked and layer.use_irope,
            f"layer {layer.layer_id} scales scores by position, from {temperature} on": temperature > 0,
            f"layer {layer.layer_id} caps scores by {method}, not tanh": bool(cap) and method != "tanh",
        }
    return [reason for reason, holds in found.items() if holds]
