"""Stateless noise: a hash of (seed, position, token, stream), the same in every strategy, batch order and backend.

The mixer is MurmurHash3's 32-bit finaliser (Appleby, public domain). The streams are independent: the draft's sampling
noise tells nothing about the target's.
"""

from __future__ import annotations

import torch

from builders.kernels.triton_runtime import tl, triton

DRAFT, ACCEPT, TARGET = 0x1F123BB5, 0x2545F491, 0x3C6EF372
"""Streams: the draft's sampling, the accept test, the target's sampling."""

_MASK = 0xFFFFFFFF


def key(seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
    """One key int64 [R] per row, from seeds int64 [R] and the positions int64 [R] of the tokens to be sampled."""
    mixed = _mix((seeds & _MASK) ^ stream)
    mixed = _mix(mixed ^ ((seeds >> 32) & _MASK))
    return _mix(mixed ^ (positions & _MASK))


def uniform(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Uniform fp32 noise in the open interval (0, 1), for keys and tokens int64 that broadcast."""
    hashed = _mix((_mix(keys ^ tokens) + keys) & _MASK)
    return ((hashed >> 9).float() + 0.5) * 2.0**-23


def gumbel(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise fp32, for keys and tokens int64 that broadcast: argmax(logits + noise) samples from
    softmax(logits)."""
    return -torch.log(-torch.log(uniform(keys, tokens)))


def _mix(h: torch.Tensor) -> torch.Tensor:
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


@triton.jit
def triton_mix(h):
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def triton_key(seed, position, stream: tl.constexpr):
    mixed = triton_mix((seed & 0xFFFFFFFF).to(tl.uint32) ^ stream)
    mixed = triton_mix(mixed ^ ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    return triton_mix(mixed ^ (position & 0xFFFFFFFF).to(tl.uint32))


@triton.jit
def triton_uniform(key, token):
    hashed = triton_mix(triton_mix(key ^ token.to(tl.uint32)) + key)
    return ((hashed >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def triton_gumbel(key, token):
    return -tl.log(-tl.log(triton_uniform(key, token)))
