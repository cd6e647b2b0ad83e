"""The path that accepted draft tokens make through a tree."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.trees.kernels.ancestor_masks import read_parents, trees_alone


class FollowTree(NamedTuple):
    """Follows the target's tokens down R trees of up to N draft tokens, K deep at most.

    - draft_tokens   int64 [R, N]
    - parents        int64 [R, N], as DraftTree has them; the first that is none ends a row's tree
    - target_tokens  int64 [R, 1 + N], the target's own token after each query token
    - max_depth      K

    All contiguous. Of draft tokens that are the same after the same token the first counts. Returns

    - accepted       int64 [R], draft tokens of the path
    - path           int64 [R, K], their query tokens; -1 after the last
    - next_tokens    int64 [R], the target's token after the last of them
    """

    draft_tokens: torch.Tensor
    parents: torch.Tensor
    target_tokens: torch.Tensor
    max_depth: int

    def reference(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parents = trees_alone(self.parents)
        passes = self.draft_tokens == self.target_tokens.gather(1, parents.clamp(min=0))
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
            *self[:3],
            accepted,
            path,
            next_tokens,
            tokens,
            self.max_depth,
            BLOCK=triton.next_power_of_2(tokens),
            num_warps=1,
            **dependent_launch(accepted.device),
        )
        return accepted, path, next_tokens

    def fake(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, new = len(self.parents), self.parents.new_empty
        return new(rows), new(rows, self.max_depth), new(rows)


@triton.jit
def _follow_tree_kernel(
    draft_tokens,  # int64 [R, N]
    parents,  # int64 [R, N]
    target_tokens,  # int64 [R, 1 + N]
    accepted,  # out: int64 [R]
    path,  # out: int64 [R, K]
    next_tokens,  # out: int64 [R]
    tokens,  # 1 + N
    max_depth,  # K
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, BLOCK)
    # Which draft tokens are the target's own after their parent
    parent = read_parents(parents, row, tokens, BLOCK)
    drafted = tl.load(draft_tokens + row * (tokens - 1) + token - 1, mask=parent >= 0, other=-1)
    due = tl.load(target_tokens + row * tokens + parent, mask=parent >= 0, other=-2)
    passes = drafted == due
    # Down the tree, one token a step
    last = 0
    count = 0
    for step in range(0, max_depth):
        child = tl.min(tl.where((parent == last) & passes, token, BLOCK), 0)
        continues = (child < BLOCK) & (count == step)
        last = tl.where(continues, child, last)
        count += tl.where(continues, 1, 0)
        tl.store(path + row * max_depth + step, tl.where(continues, child, -1).to(tl.int64))
    tl.store(accepted + row, count)
    tl.store(next_tokens + row, tl.load(target_tokens + row * tokens + last))


follow_tree = define_op("spec_decode::follow_tree", FollowTree)
