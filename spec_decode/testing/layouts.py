"""How the tests store tokens in a cache and find them there, independent of any backend's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from attn_backends import FP8_DS_MLA, KVCache, KVScales, cache_layout
from builders import AttentionSpec

Scales: TypeAlias = Sequence[float]
"""Of an e4m3 cache's keys or values: one for all heads or one for each; empty in any other cache."""


class Layout:
    """Where a token's key and value lie in a cache, and how they are rounded: here, numbers of one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def representable(self, key: torch.Tensor, scales: Scales) -> torch.Tensor:
        """Round key [..., D] to the nearest value that the cache can hold, in the key's dtype. scales: its own."""
        return key.to(self.dtype).to(key.dtype)

    def read(self, key: torch.Tensor, scales: Scales) -> torch.Tensor:
        """Return what attention reads, float64, where a key [..., D] was written."""
        return key.double()

    def poison(self, cache: KVCache) -> None:
        """Fill the cache with values that turn an output into NaN."""
        for tensor in (cache.key, cache.value):
            tensor.copy_(torch.full((), float("nan")).to(tensor.dtype))

    def put(
        self, cache: KVCache, pages: torch.Tensor, offsets: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store n tokens, each in a different place.

        pages, offsets: int64 [n], on the CPU
        key, value:     [n, num_kv_heads, D] and [n, num_kv_heads, E], in any dtype
        """
        places = pages.to(cache.key.device), offsets.to(cache.key.device)
        cache.key[places] = key.to(cache.key)
        cache.value[places] = value.to(cache.value)

    def take(self, cache: KVCache, page: int, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return key [num_kv_heads, D] and value [num_kv_heads, E] of one token, on the CPU."""
        return cache.key[page, offset].cpu(), cache.value[page, offset].cpu()


class E4m3Layout(Layout):
    """Numbers of float8_e4m3fn, each a value over its head's scale."""

    def representable(self, key: torch.Tensor, scales: Scales) -> torch.Tensor:
        return self.read(key, scales).to(key.dtype)

    def read(self, key: torch.Tensor, scales: Scales) -> torch.Tensor:
        return self._encode(key, scales).double() * _by_head(scales).double()

    def put(
        self, cache: KVCache, pages: torch.Tensor, offsets: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        assert cache.scales is not None
        parts = (key, cache.scales.key_floats), (value, cache.scales.value_floats)
        super().put(cache, pages, offsets, *(self._encode(part, scales) for part, scales in parts))

    def take(self, cache: KVCache, page: int, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert cache.scales is not None
        key, value = super().take(cache, page, offset)
        scales = cache.scales
        return key.float() * _by_head(scales.key_floats), value.float() * _by_head(scales.value_floats)

    def _encode(self, key: torch.Tensor, scales: Scales) -> torch.Tensor:
        return (key.cpu().float() / _by_head(scales)).clamp(-448.0, 448.0).to(self.dtype)


def _by_head(scales: Scales) -> torch.Tensor:
    """fp32 [num_kv_heads or 1, 1]."""
    return torch.tensor(scales, dtype=torch.float32)[:, None]


class Fp8DsMlaLayout(Layout):
    """A page of fp8_ds_mla, byte by byte: 448 e4m3 and 64 bf16 numbers per token, then 8 scale bytes per token."""

    def representable(self, key: torch.Tensor, scales: Scales) -> torch.Tensor:
        return self._decode(*self._encode(key.reshape(-1, 512))).view(key.shape).to(key.dtype)

    def poison(self, cache: KVCache) -> None:
        cache.key.fill_(0xFF)

    def put(
        self, cache: KVCache, pages: torch.Tensor, offsets: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        rows, data_bytes = cache.key.view(len(cache.key), -1), cache.key.shape[1] * 576
        starts = offsets[:, None] * 576, data_bytes + offsets[:, None] * 8
        for start, source in zip(starts, self._encode(key.cpu().flatten(1)), strict=True):
            places = pages[:, None], start + torch.arange(source.shape[1])
            rows[tuple(place.to(rows.device) for place in places)] = source.to(rows.device)

    def take(self, cache: KVCache, page: int, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
        latent = self._decode(*(part[None].cpu() for part in self._bytes_of(cache, page, offset)))
        return latent, latent

    def _bytes_of(self, cache: KVCache, page: int, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
        row, scales = cache.key[page].view(-1), cache.key.shape[1] * 576 + offset * 8
        return row[offset * 576 : (offset + 1) * 576], row[scales : scales + 8]

    def _encode(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode latents [n, 512] as bytes, uint8 [n, 576], and scales, uint8 [n, 8]."""
        latent = latent.bfloat16()
        tiles = latent[:, :448].float().view(-1, 7, 64)
        # The smallest x with amax <= 448 * 2^x, where amax = m * 2^e and 448 = 0.875 * 2^9; amax is at least 1e-4.
        mantissa, exponent = torch.frexp(tiles.abs().amax(2).clamp(min=1e-4))
        power = torch.where(mantissa <= 0.875, exponent - 9, exponent - 8)
        quantised = torch.ldexp(tiles, -power[..., None]).to(torch.float8_e4m3fn).flatten(1)
        scales = torch.cat([power + 127, torch.zeros_like(power[:, :1])], 1).to(torch.uint8)
        return torch.cat([quantised.view(torch.uint8), latent[:, 448:].contiguous().view(torch.uint8)], 1), scales

    def _decode(self, data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Decode bytes and scales to latents, bfloat16 [n, 512]."""
        tiles = data[:, :448].contiguous().view(torch.float8_e4m3fn).float().view(-1, 7, 64)
        nope = torch.ldexp(tiles, (scales[:, :7].int() - 127)[..., None]).flatten(1)
        return torch.cat([nope, data[:, 448:].contiguous().view(torch.bfloat16).float()], 1).bfloat16()


def layout_of(spec: AttentionSpec) -> Layout:
    """Return the layout of a spec's cache."""
    scaled = E4m3Layout if spec.num_kv_scales else Layout
    return (Fp8DsMlaLayout if cache_layout(spec) is FP8_DS_MLA else scaled)(spec.cache_dtype)


_KEY_SCALES, _VALUE_SCALES = (0.37, 1.7, 0.083, 0.9), (1.3, 0.21, 0.6)
"""Taken in turn by the heads. None is a power of two, so that a rounding shows, and none is 1."""


def scales_of(spec: AttentionSpec, device: torch.device) -> KVScales | None:
    """Return scales for a spec's cache, which differ between keys, values and heads; None if it has none."""
    heads = range(spec.num_kv_scales)
    key, value = ([scales[head % len(scales)] for head in heads] for scales in (_KEY_SCALES, _VALUE_SCALES))
    return KVScales.of(key, value, device) if heads else None
