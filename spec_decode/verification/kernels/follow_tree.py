"""Follow the accepted path through a tree."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.trees.kernels.ancestor_masks import read_parents, valid_parents


class FollowTree(NamedTuple):
    """Follow the target's tokens down R trees of up to N draft tokens, at most K deep.

    - draft_tokens   int64 [R, N]
    - parents        int64 [R, N], in the format of DraftTree; the first invalid one ends a row's tree
    - target_tokens  int64 [R, 1 + N], the target's own token after each query token; a negative one equals no draft's
    - max_depth      K

    All contiguous. Among equal siblings the first counts. Returns

    - accepted       int64 [R], number of draft tokens on the path
    - path           int64 [R, K], their query tokens; -1 after the last
    - next_tokens    int64 [R], the target's token after the last of them
    """

    draft_tokens: torch.Tensor
    parents: torch.Tensor
    target_tokens: torch.Tensor
    max_depth: int

    def reference(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parents = valid_parents(self.parents)
        wanted = self.target_tokens.gather(1, parents.clamp(min=0))
        passes = (self.draft_tokens == wanted) & (wanted >= 0)
        last = parents.new_zeros(len(parents))
        path = parents.new_full((len(parents), self.max_depth), -1)
        for step in range(self.max_depth):
            follows = (parents == last[:, None]) & passes
            continues = follows.any(1)
            last = torch.where(continues, follows.long().argmax(1) + 1, last)
            path[:, step] = torch.where(continues, last, -1)
            passes = passes & continues[:, None]
        return (path > 0).sum(1), path, self.target_tokens.gather(1, last[:, None])[:, 0]

    def launch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        accepted, path, next_tokens = self.fake()
        rows, tokens = self.target_tokens.shape
        _follow_tree_kernel[(rows,)](
            draft_tokens_ptr=self.draft_tokens,
            parents_ptr=self.parents,
            target_tokens_ptr=self.target_tokens,
            num_accepted_ptr=accepted,
            path_ptr=path,
            next_tokens_ptr=next_tokens,
            num_tokens=tokens,
            max_depth=self.max_depth,
            BLOCK_N=next_power_of_2(tokens),
            num_warps=1,
            **dependent_launch(accepted.device),
        )
        return accepted, path, next_tokens

    def fake(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, new = len(self.parents), self.parents.new_empty
        return new(rows), new(rows, self.max_depth), new(rows)


@triton.jit
def _follow_tree_kernel(
    draft_tokens_ptr,  # int64 [R, N]
    parents_ptr,  # int64 [R, N]
    target_tokens_ptr,  # int64 [R, 1 + N]
    num_accepted_ptr,  # out: int64 [R]
    path_ptr,  # out: int64 [R, K]
    next_tokens_ptr,  # out: int64 [R]
    num_tokens,  # 1 + N
    max_depth,  # K
    BLOCK_N: tl.constexpr,  # 1 + N, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """From the root down, step to the first child that equals the target's token after its parent. One program per
    row."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    # 1. Which draft tokens equal the target's token after their parent
    parent = read_parents(parents_ptr, row, num_tokens, BLOCK_N)
    draft_tokens = tl.load(draft_tokens_ptr + row * (num_tokens - 1) + offs_n - 1, mask=parent >= 0, other=-1)
    target_tokens = tl.load(target_tokens_ptr + row * num_tokens + parent, mask=parent >= 0, other=-2)
    accept = (draft_tokens == target_tokens) & (target_tokens >= 0)
    # 2. Walk down the tree, one token per step
    last = 0
    num_accepted = 0
    for depth in range(0, max_depth):
        child = tl.min(tl.where((parent == last) & accept, offs_n, BLOCK_N), 0)
        continues = (child < BLOCK_N) & (num_accepted == depth)
        last = tl.where(continues, child, last)
        num_accepted += tl.where(continues, 1, 0)
        tl.store(path_ptr + row * max_depth + depth, tl.where(continues, child, -1).to(tl.int64))
    tl.store(num_accepted_ptr + row, num_accepted)
    tl.store(next_tokens_ptr + row, tl.load(target_tokens_ptr + row * num_tokens + last))


follow_tree = define_op("spec_decode::follow_tree", FollowTree)
