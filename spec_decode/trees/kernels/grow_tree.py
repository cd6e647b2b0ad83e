"""A step of a dynamic tree: every child of the tokens just drafted becomes a candidate, the best are drafted next."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


class GrowTree(NamedTuple):
    """Appends F * W candidates a row, and takes the W best of them as the next frontier (EAGLE-2, Li et al., 2024).

    A score is a path's log-probability, so at most that of the path without its last token. R rows, F tokens on the
    frontier: 1, the root, at step 0, then W. Of equal scores the first candidate wins.

    Read:

    - step             int64 [1], 0 to K - 1
    - child_tokens     int64 [R, F, W], the W most probable children of each token of the frontier
    - child_scores     fp32 [R, F, W], their log-probabilities; -inf where there is none

    Written in place, for C = W + (K - 1) * W * W candidates a row:

    - tokens           int64 [R, C]
    - parents          int64 [R, C], the candidate that each follows; -1 is the root
    - scores           fp32 [R, C]; step 0 begins a round: it sets those of all other candidates to -inf
    - frontier         int64 [R, W], the candidates that are drafted next. Read where F is W
    - frontier_scores  fp32 [R, W], their scores; -inf where there is none. Read where F is W
    - frontier_tokens  int64 [R, W], their tokens
    - frontier_places  int64 [R, W], the place on the last frontier, 0 to F - 1, of the token that each follows
    """

    step: torch.Tensor
    child_tokens: torch.Tensor
    child_scores: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor
    frontier: torch.Tensor
    frontier_scores: torch.Tensor
    frontier_tokens: torch.Tensor
    frontier_places: torch.Tensor

    def reference(self) -> None:
        rows, places, width = self.child_tokens.shape
        count, step = places * width, int(self.step)
        first = 0 if step == 0 else width + (step - 1) * width * width
        above = self.frontier_scores if step else torch.zeros(rows, 1)
        parents = self.frontier if step else torch.full((rows, 1), -1)
        scores = (above[..., None] + self.child_scores).flatten(1)
        taken = slice(first, first + count)
        if step == 0:
            self.scores.fill_(-torch.inf)
        self.tokens[:, taken] = self.child_tokens.flatten(1)
        self.parents[:, taken] = parents[..., None].expand(rows, places, width).flatten(1)
        self.scores[:, taken] = scores
        best = scores.sort(dim=1, descending=True, stable=True)
        chosen = best.indices[:, :width]
        self.frontier.copy_(first + chosen)
        self.frontier_scores.copy_(best.values[:, :width])
        self.frontier_tokens.copy_(self.child_tokens.flatten(1).gather(1, chosen))
        self.frontier_places.copy_(chosen // width)

    def launch(self) -> None:
        rows, places, width = self.child_tokens.shape
        block = triton.next_power_of_2(places * width)
        _grow_tree_kernel[(rows,)](
            *self,
            self.tokens.shape[1],
            PLACES=places,
            WIDTH=width,
            BLOCK=block,
            num_warps=max(1, min(8, block * block // 2048)),
            **dependent_launch(self.tokens.device),
        )


@triton.jit
def ranks(
    score,  # fp32 [BLOCK]
    candidate,  # [BLOCK]
    among,  # fp32 [CHUNK]
    at,  # [CHUNK]
):
    """How many of `among`, candidates `at`, come before each of `score`: larger, or as large and earlier."""
    others, mine = among[None, :], score[:, None]
    earlier = (others == mine) & (at[None, :] < candidate[:, None])
    return tl.sum(((others > mine) | earlier).to(tl.int32), 1)


@triton.jit
def _grow_tree_kernel(
    step,  # int64 [1]
    child_tokens,  # int64 [R, F, W]
    child_scores,  # fp32 [R, F, W]
    tokens,  # out: int64 [R, C]
    parents,  # out: int64 [R, C]
    scores,  # out: fp32 [R, C]
    frontier,  # in and out: int64 [R, W]
    frontier_scores,  # in and out: fp32 [R, W]
    frontier_tokens,  # out: int64 [R, W]
    frontier_places,  # out: int64 [R, W]
    candidates,  # C
    PLACES: tl.constexpr,  # F
    WIDTH: tl.constexpr,  # W
    BLOCK: tl.constexpr,  # F * W, rounded up to a power of two
    PDL: tl.constexpr,
):
    """One program per row."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK)
    inside = candidate < PLACES * WIDTH
    place = candidate // WIDTH
    at_step = tl.load(step)
    # The children, and the scores of their paths
    children = row * PLACES * WIDTH + candidate
    token = tl.load(child_tokens + children, mask=inside, other=0)
    score = tl.load(child_scores + children, mask=inside, other=float("-inf"))
    first = tl.where(at_step > 0, WIDTH + (at_step - 1) * WIDTH * WIDTH, 0)
    parent = tl.full((BLOCK,), -1, tl.int64)
    if at_step > 0:
        score += tl.load(frontier_scores + row * WIDTH + place, mask=inside, other=0.0)
        parent = tl.load(frontier + row * WIDTH + place, mask=inside, other=-1)
    # Store them as candidates. All of the last frontier is read before the next one is written over it.
    tl.debug_barrier()
    if at_step == 0:
        for start in range(PLACES * WIDTH, candidates, BLOCK):
            other = start + candidate
            tl.store(scores + row * candidates + other, float("-inf"), mask=other < candidates)
    stored = row * candidates + first + candidate
    tl.store(tokens + stored, token, mask=inside)
    tl.store(parents + stored, parent, mask=inside)
    tl.store(scores + stored, score, mask=inside)
    # The next frontier. What is no candidate comes after all that are.
    rank = ranks(score, candidate, score, candidate)
    chosen = inside & (rank < WIDTH)
    to = row * WIDTH + rank
    tl.store(frontier + to, first + candidate, mask=chosen)
    tl.store(frontier_scores + to, score, mask=chosen)
    tl.store(frontier_tokens + to, token, mask=chosen)
    tl.store(frontier_places + to, place.to(tl.int64), mask=chosen)


grow_tree = define_op(
    "spec_decode::grow_tree",
    GrowTree,
    mutates=(
        *("tokens", "parents", "scores"),
        *("frontier", "frontier_scores", "frontier_tokens", "frontier_places"),
    ),
)
