"""Backends that misread the scales of an 8-bit cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attn_backends import KVCache, KVScales
from attn_backends.torch_reference import TorchReference
from tests.mutants.attention import RIGHT
from tests.mutants.mutant import Mutant, backend, having

_WRITES = "numerics.writes_round_and_saturate"


def _reads(name: str, change: Any, cases: str = "fp8_cache-*") -> Mutant:
    """Make a mutant whose forward reads a cache with other scales."""

    def forward(self: Any, query: Any, cache: Any, metadata: Any, **options: Any) -> torch.Tensor:
        scales = cache.scales and change(cache.scales)
        return TorchReference.forward(self, query, replace(cache, scales=scales), metadata, **options)

    return replace(having(name, RIGHT, forward=forward), cases=cases)


ignores_key_scales = _reads("ignores_key_scales", lambda scales: replace(scales, key=torch.ones_like(scales.key)))
ignores_value_scales = _reads(
    "ignores_value_scales", lambda scales: replace(scales, value=torch.ones_like(scales.value))
)
scales_values_like_keys = _reads("scales_values_like_keys", lambda scales: replace(scales, value=scales.key))
reads_the_first_heads_scales = _reads(
    "reads_the_first_heads_scales",
    lambda scales: replace(
        scales, key=scales.key[:1].expand_as(scales.key).clone(), value=scales.value[:1].expand_as(scales.value).clone()
    ),
    "fp8_cache_head_scales-*",
)


def _writes(name: str, change: Any) -> Mutant:
    """Make a mutant that changes new keys and values, and their cache, before it writes."""

    def write_kv(self: Any, key: Any, value: Any, cache: Any, metadata: Any) -> None:
        parts = [change(part, scale) for part, scale in ((key, cache.key_scale), (value, cache.value_scale))]
        TorchReference.write_kv(self, *parts, cache, metadata)

    return having(name, _WRITES, write_kv=write_kv)


does_not_saturate = _writes(
    "does_not_saturate",
    lambda part, scale: part.masked_fill(part.float().abs() > 448 * scale[:, None], torch.nan),
)
saturates_at_240 = _writes(
    "saturates_at_240", lambda part, scale: part.float().clamp(-240 * scale[:, None], 240 * scale[:, None]).to(part)
)
writes_zero_for_nan = _writes("writes_zero_for_nan", lambda part, scale: torch.where(part.isnan(), 0.0, part))
truncates = _writes("truncates", lambda part, scale: (part.float() * (1 - 2**-5)).to(part))
writes_by_one_scale = replace(
    _writes("writes_by_one_scale", lambda part, scale: (part.float() * scale[:, None] / scale[0]).to(part)),
    cases="fp8_cache_head_scales-*",
)


@backend("refusal.bad_scales_never_reach_a_kernel")
class AssumesOnes(TorchReference):
    """Takes a cache without scales for one whose scales are 1."""

    def forward(self, query: Any, cache: KVCache, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
        if cache.scales is None:
            cache = replace(cache, scales=KVScales.ones(spec, query.device))
        return super().forward(query, cache, metadata, spec=spec, sinks=sinks)
