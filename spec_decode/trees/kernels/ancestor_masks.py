"""Attention masks of each request's tree."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


class AncestorMasks(NamedTuple):
    """Return masks and depths, both int64 [R, 1 + N], of the query tokens of R trees of up to N draft tokens.

    Bit j of a token's mask is set if it attends to query token j: its ancestors, the root and itself. Its depth is the
    number of draft tokens on the path to it. A token after its tree's end has mask 0 and depth 0.

    - parents  int64 [R, N], contiguous: for each draft token the query token that it follows, see DraftTree; the first
               invalid one, such as -1, ends a row's tree. N is below MAX_TREE_TOKENS
    """

    parents: torch.Tensor

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        masks, depths = (torch.zeros(len(self.parents), 1 + self.parents.shape[1], dtype=torch.int64) for _ in range(2))
        masks[:, 0] = 1
        row = torch.arange(len(self.parents))
        for token, parent in enumerate(valid_parents(self.parents).unbind(1), 1):
            own = -(2**63) if token == 63 else 1 << token
            masks[:, token] = torch.where(parent >= 0, masks[row, parent.clamp(min=0)] | own, 0)
            depths[:, token] = torch.where(parent >= 0, depths[row, parent.clamp(min=0)] + 1, 0)
        return masks, depths

    def launch(self) -> tuple[torch.Tensor, torch.Tensor]:
        masks, depths = self.fake()
        rows, tokens = masks.shape
        _ancestor_masks_kernel[(rows,)](
            parents_ptr=self.parents,
            masks_ptr=masks,
            depths_ptr=depths,
            num_tokens=tokens,
            BLOCK_N=next_power_of_2(tokens),
            num_warps=1,
            **dependent_launch(masks.device),
        )
        return masks, depths

    def fake(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows, tokens = self.parents.shape
        return self.parents.new_empty(rows, 1 + tokens), self.parents.new_empty(rows, 1 + tokens)


def valid_parents(parents: torch.Tensor) -> torch.Tensor:
    """Return parents int64 [R, N] with -1 from a row's first invalid one on: a parent must precede its child."""
    token = torch.arange(parents.shape[1], device=parents.device)
    return parents.where(((parents >= 0) & (parents <= token)).long().cumprod(1).bool(), -1)


@triton.jit
def read_parents(
    parents_ptr,  # int64 [R, N]
    row,
    num_tokens,  # 1 + N
    BLOCK_N: tl.constexpr,  # 1 + N, rounded up to a power of two
):
    """Load the parents int64 [BLOCK_N] of a row's query tokens, -1 for the root and from the tree's end on."""
    offs_n = tl.arange(0, BLOCK_N)
    mask = (offs_n > 0) & (offs_n < num_tokens)
    parent = tl.load(parents_ptr + row * (num_tokens - 1) + offs_n - 1, mask=mask, other=-1)
    end = tl.min(tl.where((offs_n > 0) & ((parent < 0) | (parent >= offs_n)), offs_n, BLOCK_N), 0)
    return tl.where(offs_n < end, parent, -1)


@triton.jit
def _ancestor_masks_kernel(
    parents_ptr,  # int64 [R, N]
    masks_ptr,  # out: int64 [R, 1 + N]
    depths_ptr,  # out: int64 [R, 1 + N]
    num_tokens,  # 1 + N
    BLOCK_N: tl.constexpr,  # 1 + N, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """mask[n] = mask[parent[n]] | 1 << n, depth[n] = depth[parent[n]] + 1. One program per row."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    parent = read_parents(parents_ptr, row, num_tokens, BLOCK_N)
    mask = tl.where(offs_n == 0, 1, 0).to(tl.int64)
    depth = tl.zeros((BLOCK_N,), tl.int64)
    for n in range(1, num_tokens):
        parent_n = tl.sum(tl.where(offs_n == n, parent, 0), 0)
        if parent_n >= 0:
            mask_n = tl.sum(tl.where(offs_n == parent_n, mask, 0), 0) | (tl.full((), 1, tl.int64) << n)
            depth_n = tl.sum(tl.where(offs_n == parent_n, depth, 0), 0) + 1
            mask = tl.where(offs_n == n, mask_n, mask)
            depth = tl.where(offs_n == n, depth_n, depth)
    tl.store(masks_ptr + row * num_tokens + offs_n, mask, mask=offs_n < num_tokens)
    tl.store(depths_ptr + row * num_tokens + offs_n, depth, mask=offs_n < num_tokens)


ancestor_masks = define_op("spec_decode::ancestor_masks", AncestorMasks)
