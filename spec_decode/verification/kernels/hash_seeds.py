"""Hash seeds and positions to new seeds."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling import noise
from spec_decode.sampling.noise import triton_key

_BLOCK = 128
_STREAM = 0x510E527F
"""A separate stream: these hashes say nothing about the noise from the same seeds and positions."""


class HashSeeds(NamedTuple):
    """Return a seed int64 [R] per row, from contiguous seeds and positions int64 [R]."""

    seeds: torch.Tensor
    positions: torch.Tensor

    def reference(self) -> torch.Tensor:
        return noise.key(self.seeds, self.positions, _STREAM)

    def launch(self) -> torch.Tensor:
        hashed, count = torch.empty_like(self.seeds), len(self.seeds)
        _hash_kernel[(cdiv(count, _BLOCK),)](
            seeds_ptr=self.seeds,
            positions_ptr=self.positions,
            out_ptr=hashed,
            num_rows=count,
            STREAM=_STREAM,
            BLOCK_R=_BLOCK,
            num_warps=1,
            **dependent_launch(hashed.device),
        )
        return hashed

    def fake(self) -> torch.Tensor:
        return torch.empty_like(self.seeds)


@triton.jit
def _hash_kernel(
    seeds_ptr,  # int64 [R]
    positions_ptr,  # int64 [R]
    out_ptr,  # out: int64 [R]
    num_rows,  # R
    STREAM: tl.constexpr,  # noise stream
    BLOCK_R: tl.constexpr,  # rows per program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """out = key(seed, position), see noise.py. A program has BLOCK_R rows."""
    await_previous(PDL)
    offs_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = offs_r < num_rows
    seed = tl.load(seeds_ptr + offs_r, mask=mask, other=0)
    position = tl.load(positions_ptr + offs_r, mask=mask, other=0)
    tl.store(out_ptr + offs_r, triton_key(seed, position, STREAM).to(tl.int64), mask=mask)


hash_seeds = define_op("spec_decode::hash_seeds", HashSeeds)
