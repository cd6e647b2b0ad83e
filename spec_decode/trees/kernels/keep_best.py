"""The best candidates of a dynamic tree, as a tree of their own."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.trees.kernels.grow_tree import ranks

_CHUNK = 64
"""Candidates that all others are compared with at a time."""


class KeepBest(NamedTuple):
    """The tree of the N best of C candidates in each of R rows: draft tokens and parents int64 [R, N], as TreeBatch has
    them.

    They keep their order. No score is above its parent's, and of equal ones the first candidate wins, so that whoever
    is kept has its path kept too. A row with fewer candidates than N ends with -1.

    - tokens      int64 [R, C], contiguous like the others
    - parents     int64 [R, C], the candidate, an earlier one, that each follows; -1 is the root
    - scores      fp32 [R, C]; -inf of those that are none
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
        block = triton.next_power_of_2(candidates)
        _keep_best_kernel[(rows,)](
            *self[:3],
            draft_tokens,
            parents,
            candidates,
            self.num_tokens,
            KEPT=triton.next_power_of_2(self.num_tokens),
            BLOCK=block,
            CHUNK=min(_CHUNK, block),
            num_warps=max(1, min(8, block // 64)),
            **dependent_launch(draft_tokens.device),
        )
        return draft_tokens, parents

    def fake(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape, new = (len(self.tokens), self.num_tokens), self.tokens.new_empty
        return new(shape), new(shape)


@triton.jit
def _keep_best_kernel(
    tokens,  # int64 [R, C]
    parents,  # int64 [R, C]
    scores,  # fp32 [R, C]
    draft_tokens,  # out: int64 [R, N]
    tree_parents,  # out: int64 [R, N]
    candidates,  # C
    count,  # N
    KEPT: tl.constexpr,  # N, rounded up to a power of two
    BLOCK: tl.constexpr,  # C, rounded up to a power of two
    CHUNK: tl.constexpr,  # candidates that all others are compared with at a time
    PDL: tl.constexpr,
):
    """One program per row."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK)
    inside = candidate < candidates
    score = tl.load(scores + row * candidates + candidate, mask=inside, other=float("-inf"))
    # How many candidates come before each
    rank = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, candidates, CHUNK):
        at = start + tl.arange(0, CHUNK)
        among = tl.load(scores + row * candidates + at, mask=at < candidates, other=float("-inf"))
        rank += ranks(score, candidate, among, at)
    # The candidates that are kept
    kept = inside & (rank < count) & (score > float("-inf"))
    query_token = tl.cumsum(kept.to(tl.int32), 0)
    token = tl.load(tokens + row * candidates + candidate, mask=inside, other=0)
    parent = tl.load(parents + row * candidates + candidate, mask=inside, other=-1)
    # A parent's query token is how many are kept up to it.
    at = tl.arange(0, KEPT)
    follows = tl.zeros((KEPT,), tl.int64)
    for place in range(0, count):
        own = kept & (query_token == place + 1)
        above = tl.sum(tl.where(own, parent, 0), 0)
        before = tl.sum((kept & (candidate <= above)).to(tl.int64), 0)
        follows = tl.where(at == place, tl.where(above < 0, 0, before), follows)
    # The tree, -1 behind its end
    total = tl.sum(kept.to(tl.int32), 0)
    tl.store(tree_parents + row * count + at, tl.where(at < total, follows, -1), mask=at < count)
    tl.store(draft_tokens + row * count + at, tl.full((KEPT,), -1, tl.int64), mask=(at < count) & (at >= total))
    tl.store(draft_tokens + row * count + query_token - 1, token, mask=kept)


keep_best = define_op("spec_decode::keep_best", KeepBest)
