"""Stateless noise: a hash of (seed, position, token, stream), the same in every strategy, batch order and backend.

A key is a 64-bit hash of seed, position and stream: at one position no two seeds share a key, and with one seed no two
positions below 2**32 do. Key and token are hashed to two 32-bit words, which form one number: noise is precise down to
2**-64, so improbable tokens are drawn with the right frequency. The streams are independent: the draft's sampling
noise says nothing about the target's. The mixer is MurmurHash3's 32-bit finaliser (Appleby, public domain).
"""

from __future__ import annotations

import torch

from builders.kernels.triton_runtime import tl, triton

DRAFT, ACCEPT, TARGET = 0x1F123BB5, 0x2545F491, 0x3C6EF372
"""Streams: the draft's sampling, the accept test, the target's sampling."""

_MASK = 0xFFFFFFFF
_MOST = 1 - 2.0**-24


def key(seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
    """Return keys int64 [R], from seeds int64 [R] and the positions int64 [R] of the tokens to sample."""
    low = _mix((seeds & _MASK) ^ stream)
    first = _mix(_mix(low ^ ((seeds >> 32) & _MASK)) ^ (positions & _MASK))
    return first << 32 | _mix((first + low) & _MASK)


def uniform(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return uniform fp32 noise in the open interval (0, 1); keys and tokens, int64, broadcast.

    Small values are exact to 24 bits: P(noise < p) = p holds for every p down to 2**-64. Near 1 the resolution is
    2**-24.
    """
    low = _mix(((keys >> 32) & _MASK) ^ tokens)
    high = _mix((low + keys) & _MASK)
    return (high.float() * 2.0**-32 + (low.float() + 0.5) * 2.0**-64).clamp(max=_MOST)


def gumbel(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, fp32: argmax(logits + noise) samples from softmax(logits). Keys and tokens, int64,
    broadcast.

    noise = -log(E) with the exponential E = -log(1 - uniform). A series keeps the smallest E as precise as the uniform:
    they give the largest noise, up to 45.
    """
    x = uniform(keys, tokens)
    series = x * (1 + x * (1 / 2 + x * (1 / 3 + x * (1 / 4))))
    return -torch.log(torch.where(x < 1 / 32, series, -torch.log(1 - x)))


def _mix(h: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's finaliser, with its shifts and factors."""
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


@triton.jit
def triton_mix(h):
    """`_mix` in a kernel, on uint32."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def triton_key(seed, position, stream: tl.constexpr):
    """`key` in a kernel: uint64, from int64 arguments that broadcast."""
    WORD: tl.constexpr = 0xFFFFFFFF
    low = triton_mix((seed & WORD).to(tl.uint32) ^ stream)
    high = triton_mix(low ^ ((seed >> 32) & WORD).to(tl.uint32))
    first = triton_mix(high ^ (position & WORD).to(tl.uint32))
    return (first.to(tl.uint64) << 32) | triton_mix(first + low).to(tl.uint64)


@triton.jit
def triton_uniform(key, token):
    """`uniform` in a kernel: fp32, from uint64 keys and tokens that broadcast."""
    TWO_TO_MINUS_32: tl.constexpr = 2.3283064365386963e-10
    TWO_TO_MINUS_64: tl.constexpr = 5.421010862427522e-20
    MOST: tl.constexpr = 0.999999940395355224609375  # 1 - 2**-24
    low = triton_mix((key >> 32).to(tl.uint32) ^ token.to(tl.uint32))
    high = triton_mix(low + key.to(tl.uint32))
    # Products with powers of two are exact, with or without fusion into the sum.
    x = high.to(tl.float32) * TWO_TO_MINUS_32 + (low.to(tl.float32) + 0.5) * TWO_TO_MINUS_64
    return tl.minimum(x, MOST)


@triton.jit
def triton_gumbel(key, token):
    """`gumbel` in a kernel: fp32, from uint64 keys and tokens that broadcast."""
    x = triton_uniform(key, token)
    series = x * (1.0 + x * (0.5 + x * (0.3333333333333333 + x * 0.25)))
    return -tl.log(tl.where(x < 0.03125, series, -tl.log(1.0 - x)))  # the series below 1 / 32
