"""Extract the best candidates of a dynamic tree as a tree."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.trees.kernels.grow_tree import ranks

_CHUNK, _PAIRS = 64, 1 << 18
"""The most candidates per tile that all others are compared with, and the most comparisons: Triton limits a tile to
2**20 elements."""


class KeepBest(NamedTuple):
    """Return the tree of the N best of C candidates in each of R rows: draft tokens and parents int64 [R, N], in the
    format of TreeBatch.

    Candidates keep their order. No score is above its parent's, and the first of equal candidates wins, so the path of
    a kept candidate is kept too. A row with fewer candidates than N ends with -1.

    - tokens      int64 [R, C], contiguous like the others
    - parents     int64 [R, C], the earlier candidate that each follows; -1 is the root
    - scores      fp32 [R, C]; -inf for none
    - num_tokens  N
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor
    num_tokens: int

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        best = self.scores.sort(dim=1, descending=True, stable=True)
        kept = torch.zeros_like(self.scores, dtype=torch.bool)
        kept.scatter_(1, best.indices[:, : self.num_tokens], best.values[:, : self.num_tokens] > -torch.inf)
        query_token = kept.long().cumsum(1)
        follows = torch.where(self.parents < 0, 0, query_token.gather(1, self.parents.clamp(min=0)))
        draft_tokens, parents = (self.tokens.new_full((len(kept), self.num_tokens), -1) for _ in range(2))
        row, candidate = kept.nonzero(as_tuple=True)
        at = query_token[row, candidate] - 1
        draft_tokens[row, at], parents[row, at] = self.tokens[row, candidate], follows[row, candidate]
        return draft_tokens, parents

    def launch(self) -> tuple[torch.Tensor, torch.Tensor]:
        draft_tokens, parents = self.fake()
        rows, candidates = self.tokens.shape
        block = next_power_of_2(candidates)
        _keep_best_kernel[(rows,)](
            tokens_ptr=self.tokens,
            parents_ptr=self.parents,
            scores_ptr=self.scores,
            draft_tokens_ptr=draft_tokens,
            tree_parents_ptr=parents,
            num_candidates=candidates,
            num_tokens=self.num_tokens,
            BLOCK_N=next_power_of_2(self.num_tokens),
            BLOCK_C=block,
            CHUNK=min(_CHUNK, block, max(1, _PAIRS // block)),
            num_warps=max(1, min(8, block // 64)),
            **dependent_launch(draft_tokens.device),
        )
        return draft_tokens, parents

    def fake(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape, new = (len(self.tokens), self.num_tokens), self.tokens.new_empty
        return new(shape), new(shape)


@triton.jit
def _keep_best_kernel(
    tokens_ptr,  # int64 [R, C]
    parents_ptr,  # int64 [R, C]
    scores_ptr,  # fp32 [R, C]
    draft_tokens_ptr,  # out: int64 [R, N]
    tree_parents_ptr,  # out: int64 [R, N]
    num_candidates,  # C
    num_tokens,  # N
    BLOCK_N: tl.constexpr,  # N, rounded up to a power of two
    BLOCK_C: tl.constexpr,  # C, rounded up to a power of two
    CHUNK: tl.constexpr,  # candidates per tile that all others are compared with
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Rank all candidates by score, and keep the num_tokens best in their order. One program per row."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask = offs_c < num_candidates
    score = tl.load(scores_ptr + row * num_candidates + offs_c, mask=mask, other=float("-inf"))
    # 1. The rank of each candidate
    rank = tl.zeros((BLOCK_C,), tl.int32)
    for start in range(0, num_candidates, CHUNK):
        offs_other = start + tl.arange(0, CHUNK)
        in_row = offs_other < num_candidates
        other_score = tl.load(scores_ptr + row * num_candidates + offs_other, mask=in_row, other=float("-inf"))
        rank += ranks(score, offs_c, other_score, offs_other)
    # 2. The kept candidates
    is_kept = mask & (rank < num_tokens) & (score > float("-inf"))
    query_token = tl.cumsum(is_kept.to(tl.int32), 0)
    token = tl.load(tokens_ptr + row * num_candidates + offs_c, mask=mask, other=0)
    parent = tl.load(parents_ptr + row * num_candidates + offs_c, mask=mask, other=-1)
    # 3. A parent's query token is the number of kept candidates up to and including it
    offs_n = tl.arange(0, BLOCK_N)
    follows = tl.zeros((BLOCK_N,), tl.int64)
    for n in range(0, num_tokens):
        is_n = is_kept & (query_token == n + 1)
        parent_n = tl.sum(tl.where(is_n, parent, 0), 0)
        num_before = tl.sum((is_kept & (offs_c <= parent_n)).to(tl.int64), 0)
        follows = tl.where(offs_n == n, tl.where(parent_n < 0, 0, num_before), follows)
    # 4. The tree, -1 past its end
    num_kept = tl.sum(is_kept.to(tl.int32), 0)
    tree_parent = tl.where(offs_n < num_kept, follows, -1)
    tl.store(tree_parents_ptr + row * num_tokens + offs_n, tree_parent, mask=offs_n < num_tokens)
    past_end = (offs_n < num_tokens) & (offs_n >= num_kept)
    tl.store(draft_tokens_ptr + row * num_tokens + offs_n, tl.full((BLOCK_N,), -1, tl.int64), mask=past_end)
    tl.store(draft_tokens_ptr + row * num_tokens + query_token - 1, token, mask=is_kept)


keep_best = define_op("spec_decode::keep_best", KeepBest)
