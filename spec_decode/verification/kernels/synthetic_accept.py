"""Synthetic acceptance: one uniform per row decides how many draft tokens are accepted, whichever they are."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling import noise
from spec_decode.verification.kernels.accept_draft import accept_uniform, read_draft
from spec_decode.verification.kernels.distributions import count_leading


class SyntheticAccept(NamedTuple):
    """Return how many draft tokens are accepted, int64 [R], and the position of the token after them, int64 [R].

    - draft_tokens     int64 [R, K], contiguous; the first negative one ends a row's draft
    - seeds            int64 [R], contiguous
    - draft_positions  int64 [R], contiguous: absolute position of draft token 0
    - mean             a row accepts floor(mean) tokens, and one more with probability mean - floor(mean), but no more
                       than were proposed
    """

    draft_tokens: torch.Tensor
    seeds: torch.Tensor
    draft_positions: torch.Tensor
    mean: float

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys = noise.key(self.seeds, self.draft_positions, noise.ACCEPT)
        whole = math.floor(self.mean)
        # Compare instead of floor(mean + uniform): that sum would round in fp32 and shift the mean.
        count = whole + (noise.uniform(keys, torch.zeros_like(keys)) < self.mean - whole).long()
        accepted = torch.minimum(count, count_leading(self.draft_tokens >= 0))
        return accepted, self.draft_positions + accepted

    def launch(self) -> tuple[torch.Tensor, torch.Tensor]:
        (rows, columns), whole = self.draft_tokens.shape, math.floor(self.mean)
        accepted, positions = self.fake()
        _synthetic_accept_kernel[(rows,)](
            draft_tokens_ptr=self.draft_tokens,
            seeds_ptr=self.seeds,
            draft_positions_ptr=self.draft_positions,
            num_accepted_ptr=accepted,
            positions_ptr=positions,
            mean_floor=whole,
            mean_fraction=self.mean - whole,
            num_drafts=columns,
            BLOCK_K=next_power_of_2(columns),
            num_warps=1,
            **dependent_launch(accepted.device),
        )
        return accepted, positions

    def fake(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(self.seeds), torch.empty_like(self.seeds)


@triton.jit
def _synthetic_accept_kernel(
    draft_tokens_ptr,  # int64 [R, K]
    seeds_ptr,  # int64 [R]
    draft_positions_ptr,  # int64 [R]
    num_accepted_ptr,  # out: int64 [R]
    positions_ptr,  # out: int64 [R]
    mean_floor,  # floor(mean)
    mean_fraction,  # mean - floor(mean)
    num_drafts,  # K
    BLOCK_K: tl.constexpr,  # K, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """num_accepted = min(floor(mean) + (uniform < mean - floor(mean)), draft_len). One program per row."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    _, draft_len = read_draft(row, draft_tokens_ptr, num_drafts, BLOCK_K)
    position = tl.load(draft_positions_ptr + row)
    uniform = accept_uniform(tl.load(seeds_ptr + row), position)
    num_accepted = tl.minimum(tl.where(uniform < mean_fraction, mean_floor + 1, mean_floor), draft_len).to(tl.int64)
    tl.store(num_accepted_ptr + row, num_accepted)
    tl.store(positions_ptr + row, position + num_accepted)


synthetic_accept = define_op("spec_decode::synthetic_accept", SyntheticAccept)
