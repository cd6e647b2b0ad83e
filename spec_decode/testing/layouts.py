"""How the tests store tokens in a cache and find them there, independent of any backend's kernels."""

from __future__ import annotations

import torch

from attn_backends import FP8_DS_MLA, KVCache, cache_layout
from builders import AttentionSpec


class Layout:
    """Where a token's key and value lie in a cache, and how they are rounded: here, numbers of one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def representable(self, key: torch.Tensor) -> torch.Tensor:
        """Round key [..., D] to the nearest value that the cache can hold, in the key's dtype."""
        return key.to(self.dtype).to(key.dtype)

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


class Fp8DsMlaLayout(Layout):
    """A page of fp8_ds_mla, byte by byte: 448 e4m3 and 64 bf16 numbers per token, then 8 scale bytes per token."""

    def representable(self, key: torch.Tensor) -> torch.Tensor:
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
    return (Fp8DsMlaLayout if cache_layout(spec) is FP8_DS_MLA else Layout)(spec.cache_dtype)
