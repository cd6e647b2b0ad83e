"""The fp8_ds_mla format of a latent cache (DeepSeek-V4's): its layout, and both directions in plain torch.

A page is a row of bytes of a uint8 cache [pages, page_bytes(page_size)]:

    page_size x DATA_BYTES      per token NOPE values in e4m3, then ROPE rotated values in bfloat16
    page_size x SCALE_BYTES     per token one exponent byte for each TILE of e4m3 values, then one zero byte
    padding                     up to a multiple of DATA_BYTES

A value is e4m3 x 2^(exponent byte - 127). The exponent is the smallest that brings a tile's largest magnitude to at
most 448, e4m3's maximum; a power of two costs no precision, so the dequantised value is exact in bfloat16.
"""

from __future__ import annotations

import torch

NOPE = 448
ROPE = 64
LATENT = NOPE + ROPE
TILE = 64
TILES = NOPE // TILE
DATA_BYTES = NOPE + 2 * ROPE
SCALE_BYTES = 8
TOKEN_BYTES = DATA_BYTES + SCALE_BYTES
SMALLEST_AMAX = 1e-4


def page_bytes(page_size: int) -> int:
    """Return the bytes of a page of page_size tokens, padding included."""
    return -(-page_size * TOKEN_BYTES // DATA_BYTES) * DATA_BYTES


def quantise_and_insert(latent: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, page_size: int) -> None:
    """Write latents to slots of a cache, in place.

    latent  bfloat16 [T, LATENT]
    cache   uint8 [pages, page_bytes(page_size)]
    slots   int64 or int32 [T], page * page_size + offset; one outside the cache writes nothing
    """
    written = (slots >= 0) & (slots < len(cache) * page_size)
    slots, latent = slots[written].long(), latent[written]
    tiles = latent[:, :NOPE].float().unflatten(1, (TILES, TILE))
    exponents = _exponent_bytes(tiles.abs().amax(-1))
    quantised = (tiles / _powers(exponents)[..., None]).to(torch.float8_e4m3fn).flatten(1)
    data, scales = _regions(cache, page_size)
    at = slots // page_size, slots % page_size
    data[at] = torch.cat([quantised.view(torch.uint8), latent[:, NOPE:].contiguous().view(torch.uint8)], 1)
    scales[at] = torch.nn.functional.pad(exponents, (0, SCALE_BYTES - TILES))


def gather_and_dequantise(cache: torch.Tensor, slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the latents in slots of a cache, bfloat16 [T, LATENT]; 0 for a slot outside it.

    cache  uint8 [pages, page_bytes(page_size)]
    slots  int64 or int32 [T]
    """
    owned = (slots >= 0) & (slots < len(cache) * page_size)
    slots = torch.where(owned, slots, 0).long()
    data, scales = (region[slots // page_size, slots % page_size] for region in _regions(cache, page_size))
    tiles = data[:, :NOPE].view(torch.float8_e4m3fn).float().unflatten(1, (TILES, TILE))
    nope = (tiles * _powers(scales[:, :TILES])[..., None]).flatten(1).bfloat16()
    rope = data[:, NOPE:].view(torch.bfloat16)
    return torch.cat([nope, rope], 1).masked_fill(~owned[:, None], 0.0)


def _regions(cache: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a cache: data [pages, page_size, DATA_BYTES] and scales [pages, page_size, SCALE_BYTES]."""
    data, scales = cache[:, : page_size * TOKEN_BYTES].split([page_size * DATA_BYTES, page_size * SCALE_BYTES], 1)
    return data.unflatten(1, (page_size, DATA_BYTES)), scales.unflatten(1, (page_size, SCALE_BYTES))


def _exponent_bytes(amax: torch.Tensor) -> torch.Tensor:
    """Return the byte b of the smallest 2^(b - 127) with amax <= 448 x 2^(b - 127), from the bits of amax (fp32).

    448 is 1.75 x 2^8: a mantissa above 0.75 (0x600000 of 23 bits) needs the next power. Integer arithmetic keeps torch
    and every kernel equal, where a quotient and a logarithm would round differently.
    """
    bits = amax.clamp_min(SMALLEST_AMAX).view(torch.int32)
    return ((bits + 0x1FFFFF >> 23) - 8).to(torch.uint8)


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2^(byte - 127) of exponent bytes, fp32."""
    return (exponents.int() << 23).view(torch.float32)
