"""Why a backend of this library cannot serve what vLLM requests, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attn_backends import AttentionBackend, Feature
from attn_backends.capabilities import capability_reasons
from builders import AttentionSpec

CUDA = torch.device("cuda")
_PAGE_SIZES = (16, 32, 64, 128)
"""Kernel block sizes that vLLM chooses from, for backends that do not take every multiple of a size."""
_CACHE_DTYPES = {"auto": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
EIGHT_BITS = ("fp8", "fp8_e4m3")
"""vLLM's names of a cache in float8_e4m3fn with a scale for keys and one for values."""


def not_started(what: str, reasons: list[str]) -> str:
    """Return a message with every reason on a line of its own."""
    return "\n- ".join([f"{what}, so vLLM was not started:", *reasons])


def quantised_dtype(kv_cache_dtype: str | None) -> torch.dtype | None:
    """Return the dtype of a quantised cache, by vLLM's name; None for any other cache."""
    return torch.float8_e4m3fn if kv_cache_dtype in EIGHT_BITS else None


def selector_reasons(
    ours: AttentionBackend,
    *,
    head_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str | None = None,
    has_sink: bool = False,
    has_sliding_window: bool = False,
    use_non_causal: bool = False,
    **others: Any,
) -> list[str]:
    """List what rules out a model, as far as vLLM's selector describes it: without head counts and soft cap."""
    spec = AttentionSpec(
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=head_size,
        page_size=page_sizes(ours)[0],
        dtype=dtype,
        kv_dtype=(eight_bits := quantised_dtype(kv_cache_dtype)),
        sliding_window=1 if has_sliding_window else None,
        sinks=has_sink,
        causal=not use_non_causal,
    )
    return ([] if eight_bits else cache_reasons(kv_cache_dtype, dtype)) + _spec_reasons(ours, spec)


def require_served(ours: AttentionBackend, spec: AttentionSpec, extras: Mapping[str, Any]) -> None:
    """Raise ValueError for a layer that the backend does not serve; here vLLM describes the whole layer.

    extras: layer options that are not part of its spec, by name; None if unset.
    """
    reasons = [f"has no {name}, the layer has {value!r}" for name, value in extras.items() if value is not None]
    if reasons := reasons + _spec_reasons(ours, spec):
        raise ValueError(
            f"{ours.name} cannot serve this layer: {'; '.join(reasons)}. Its outputs would be wrong, so vLLM was not "
            "started. Choose one of vLLM's own backends."
        )


def _spec_reasons(ours: AttentionBackend, spec: AttentionSpec) -> list[str]:
    return ours.capabilities.spec_reasons(spec) + ours.unsupported_reasons(spec, CUDA)


def page_sizes(ours: AttentionBackend) -> list[int]:
    """Return the backend's page sizes among vLLM's. The first stands in for any in a spec that does not know its page
    size yet: vLLM asks the backend itself for the sizes."""
    return [size for size in _PAGE_SIZES if size in ours.capabilities.page_sizes]


def serves_blocks(ours: AttentionBackend) -> bool:
    """Return whether the backend's kernels attend in blocks of draft tokens, which are not causal."""
    return Feature.NON_CAUSAL in ours.capabilities.features


def serves_capability(ours: AttentionBackend, capability: tuple[int, int]) -> bool:
    """Return whether the backend's kernels run on a device of this compute capability, vLLM's (major, minor)."""
    claims = ours.capabilities
    return not capability_reasons(claims.compute_capability, claims.one_major_version, capability)


def cache_reasons(kv_cache_dtype: str | None, dtype: torch.dtype) -> list[str]:
    """List what rules out a cache dtype, by vLLM's name, with queries of this dtype."""
    cache_dtype = _CACHE_DTYPES.get(kv_cache_dtype or "auto", kv_cache_dtype)
    if cache_dtype in (None, dtype):
        return []
    return [f"the KV cache must have the dtype of the queries, {dtype}, got {cache_dtype}; use --kv-cache-dtype auto"]
