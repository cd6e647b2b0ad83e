"""Seeds made of seeds and positions."""

from __future__ import annotations

import torch

from builders.errors import require_tensor
from builders.kernels.op_by_schema import define_op_by_schema
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling import noise
from spec_decode.sampling.noise import triton_key

_BLOCK = 128
_STREAM = 0x510E527F
"""Of its own: these hashes tell nothing about the noise that the same seeds and positions give."""


def hash_seeds(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A seed int64 [R] for each of seeds int64 [R] at positions int64 [R]; raises BatchError for other tensors."""
    for name, tensor in {"seeds": seeds, "positions": positions}.items():
        require_tensor(name, tensor, shape=(len(seeds),), dtype=torch.int64, device=seeds.device)
    hashed: torch.Tensor = _op(seeds.contiguous(), positions.contiguous())
    return hashed


def _formula(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return noise.key(seeds, positions, _STREAM)


def _launch(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    hashed = torch.empty_like(seeds)
    _hash_kernel[(triton.cdiv(len(seeds), _BLOCK),)](
        seeds,
        positions,
        hashed,
        len(seeds),
        STREAM=_STREAM,
        BLOCK=_BLOCK,
        num_warps=1,
        **dependent_launch(seeds.device),
    )
    return hashed


@triton.jit
def _hash_kernel(seeds, positions, hashed, count, STREAM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_previous(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    seed = tl.load(seeds + row, mask=inside, other=0)
    position = tl.load(positions + row, mask=inside, other=0)
    tl.store(hashed + row, triton_key(seed, position, STREAM).to(tl.int64), mask=inside)


_op = define_op_by_schema(
    "spec_decode::hash_seeds",
    "(Tensor seeds, Tensor positions) -> Tensor",
    cpu=_formula,
    cuda=_launch,
    fake=lambda seeds, positions: torch.empty_like(seeds),
)
