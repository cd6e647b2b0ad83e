"""A step of a dynamic tree: children of the frontier become candidates, and the best of them the next frontier."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton

_PAIRS = 1 << 16
"""The most comparisons per tile, candidates times others: Triton limits a tile to 2**20 elements."""


class GrowTree(NamedTuple):
    """Append F * W candidates per row, and take the W best of them as the next frontier (EAGLE-2, Li et al., 2024).

    A score is a path's log-probability, so at most that of its parent. R rows, F tokens on the frontier: 1, the root,
    at step 0, then W. The first of equal candidates wins.

    Read:

    - step             int64 [1], 0 to K - 1
    - child_tokens     int64 [R, F, W], the W most probable children of each frontier token
    - child_scores     fp32 [R, F, W], their log-probabilities; -inf for none

    Written in place, for C = W + (K - 1) * W * W candidates per row:

    - tokens           int64 [R, C]
    - parents          int64 [R, C], the candidate that each follows; -1 is the root
    - scores           fp32 [R, C]; step 0 starts a round: it sets the scores of all other candidates to -inf
    - frontier         int64 [R, W], the candidates to draft from next. Read if step > 0
    - frontier_scores  fp32 [R, W], their scores; -inf for none. Read if step > 0
    - frontier_tokens  int64 [R, W], their tokens
    - frontier_places  int64 [R, W], the index of each one's parent on the last frontier, 0 to F - 1
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
        above = self.frontier_scores if step else self.scores.new_zeros(rows, 1)
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
        block = next_power_of_2(places * width)
        _grow_tree_kernel[(rows,)](
            step_ptr=self.step,
            child_tokens_ptr=self.child_tokens,
            child_scores_ptr=self.child_scores,
            tokens_ptr=self.tokens,
            parents_ptr=self.parents,
            scores_ptr=self.scores,
            frontier_ptr=self.frontier,
            frontier_scores_ptr=self.frontier_scores,
            frontier_tokens_ptr=self.frontier_tokens,
            frontier_places_ptr=self.frontier_places,
            num_candidates=self.tokens.shape[1],
            FRONTIER=places,
            WIDTH=width,
            BLOCK_C=block,
            CHUNK=min(block, _PAIRS // block),
            num_warps=max(1, min(8, block * block // 2048)),
            **dependent_launch(self.tokens.device),
        )


@triton.jit
def ranks(
    score,  # fp32 [BLOCK_C]
    offs_c,  # [BLOCK_C]
    other_score,  # fp32 [CHUNK]
    offs_other,  # [CHUNK]
):
    """Count for each score how many of other_score, at offs_other, rank before it: larger, or equal and earlier."""
    other, own = other_score[None, :], score[:, None]
    earlier = (other == own) & (offs_other[None, :] < offs_c[:, None])
    return tl.sum(((other > own) | earlier).to(tl.int32), 1)


@triton.jit
def _path_scores(
    child_scores_ptr,  # fp32 [R, F, W]
    frontier_scores_ptr,  # fp32 [R, W]
    row,
    step,
    offs_c,
    FRONTIER: tl.constexpr,  # F
    WIDTH: tl.constexpr,  # W
):
    """Return the scores of a row's candidates offs_c of this step, -inf after the last."""
    mask = offs_c < FRONTIER * WIDTH
    score = tl.load(child_scores_ptr + row * FRONTIER * WIDTH + offs_c, mask=mask, other=float("-inf"))
    return score + tl.load(frontier_scores_ptr + row * WIDTH + offs_c // WIDTH, mask=mask & (step > 0), other=0.0)


@triton.jit
def _grow_tree_kernel(
    step_ptr,  # int64 [1]
    child_tokens_ptr,  # int64 [R, F, W]
    child_scores_ptr,  # fp32 [R, F, W]
    tokens_ptr,  # out: int64 [R, C]
    parents_ptr,  # out: int64 [R, C]
    scores_ptr,  # out: fp32 [R, C]
    frontier_ptr,  # in and out: int64 [R, W]
    frontier_scores_ptr,  # in and out: fp32 [R, W]
    frontier_tokens_ptr,  # out: int64 [R, W]
    frontier_places_ptr,  # out: int64 [R, W]
    num_candidates,  # C
    FRONTIER: tl.constexpr,  # F
    WIDTH: tl.constexpr,  # W
    BLOCK_C: tl.constexpr,  # F * W, rounded up to a power of two
    CHUNK: tl.constexpr,  # candidates per tile that all others are compared with
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """score = frontier_score + child_score; the WIDTH best are the next frontier. One program per row."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask = offs_c < FRONTIER * WIDTH
    place = offs_c // WIDTH
    step = tl.load(step_ptr)
    # 1. The children, the scores of their paths, and their ranks. Padding ranks after all candidates.
    token = tl.load(child_tokens_ptr + row * FRONTIER * WIDTH + offs_c, mask=mask, other=0)
    score = _path_scores(child_scores_ptr, frontier_scores_ptr, row, step, offs_c, FRONTIER, WIDTH)
    c_start = tl.where(step > 0, WIDTH + (step - 1) * WIDTH * WIDTH, 0)
    parent = tl.load(frontier_ptr + row * WIDTH + place, mask=mask & (step > 0), other=-1)
    rank = tl.zeros((BLOCK_C,), tl.int32)
    for start in range(0, FRONTIER * WIDTH, CHUNK):
        offs_other = start + tl.arange(0, CHUNK)
        other_score = _path_scores(child_scores_ptr, frontier_scores_ptr, row, step, offs_other, FRONTIER, WIDTH)
        rank += ranks(score, offs_c, other_score, offs_other)
    # 2. Store them as candidates. The barrier: read all of the last frontier before overwriting it.
    tl.debug_barrier()
    if step == 0:
        for start in range(FRONTIER * WIDTH, num_candidates, BLOCK_C):
            offs_other = start + offs_c
            tl.store(scores_ptr + row * num_candidates + offs_other, float("-inf"), mask=offs_other < num_candidates)
    c_offs = row * num_candidates + c_start + offs_c
    tl.store(tokens_ptr + c_offs, token, mask=mask)
    tl.store(parents_ptr + c_offs, parent, mask=mask)
    tl.store(scores_ptr + c_offs, score, mask=mask)
    # 3. The next frontier
    is_chosen = mask & (rank < WIDTH)
    frontier_offs = row * WIDTH + rank
    tl.store(frontier_ptr + frontier_offs, c_start + offs_c, mask=is_chosen)
    tl.store(frontier_scores_ptr + frontier_offs, score, mask=is_chosen)
    tl.store(frontier_tokens_ptr + frontier_offs, token, mask=is_chosen)
    tl.store(frontier_places_ptr + frontier_offs, place.to(tl.int64), mask=is_chosen)


grow_tree = define_op(
    "spec_decode::grow_tree",
    GrowTree,
    mutates=(
        *("tokens", "parents", "scores"),
        *("frontier", "frontier_scores", "frontier_tokens", "frontier_places"),
    ),
)
