"""The scales of an 8-bit KV cache: a key is its stored number times the key scale, and a value likewise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from builders import AttentionSpec
from builders.errors import BatchError, require, require_vector


@dataclass(frozen=True, slots=True)
class KVScales:
    """Scales of keys and of values: one for all KV heads, or one for each head. Make them with `of`.

    key, value                fp32 [1] or [num_kv_heads], on the cache's device
    key_floats, value_floats  the same numbers on the host, for kernels that take floats
    """

    key: Tensor
    value: Tensor
    key_floats: tuple[float, ...]
    value_floats: tuple[float, ...]

    @classmethod
    def of(cls, key: Sequence[float], value: Sequence[float], device: torch.device) -> KVScales:
        """Copy scales to a device. Raises BatchError for one that is not positive and finite in fp32, and for counts
        that differ."""
        require(
            len(key) == len(value) > 0,
            f"keys and values need as many scales, got {len(key)} and {len(value)}. Pass one for each, or one for each "
            "KV head.",
        )
        keys, values = _rounded("key", key), _rounded("value", value)
        on_key, on_value = (torch.tensor(scales, dtype=torch.float32, device=device) for scales in (keys, values))
        return cls(on_key, on_value, keys, values)

    @classmethod
    def ones(cls, spec: AttentionSpec, device: torch.device) -> KVScales | None:
        """Return scales of 1 for a spec's cache; None if the cache has none."""
        ones = (1.0,) * spec.num_kv_scales
        return cls.of(ones, ones, device) if ones else None


def _rounded(name: str, scales: Sequence[float]) -> tuple[float, ...]:
    """Return the scales as fp32 has them."""
    numbers = [scale if type(scale) in (int, float) else math.nan for scale in scales]
    rounded: list[float] = torch.tensor(numbers, dtype=torch.float32, device="cpu").tolist()
    for head, (scale, given) in enumerate(zip(rounded, scales, strict=True)):
        require(
            0 < scale < math.inf,
            f"the {name} scale of an 8-bit KV cache must be positive and finite, got {given!r} at index {head}; its "
            f"{name}s would be zeros or NaN. Calibrate it again, or pass 1.0.",
        )
    return tuple(rounded)


def check_scales(scales: KVScales | None, spec: AttentionSpec, device: torch.device) -> None:
    """Raise BatchError unless the scales are those that the spec's cache needs. It never syncs with the device."""
    needed = spec.num_kv_scales
    if (scales is not None) != (needed > 0):
        raise BatchError(
            f"a cache of [{spec.describe()}] has {needed} scales for keys and as many for values, got "
            f"{'none' if scales is None else 'some'}; its numbers would be read wrongly. Pass "
            f"{'KVCache.scales, for example KVScales.ones' if needed else 'no scales'}."
        )
    if scales is not None:
        require_vector("the key scales", scales.key, length=needed, dtype=torch.float32, device=device)
        require_vector("the value scales", scales.value, length=needed, dtype=torch.float32, device=device)
