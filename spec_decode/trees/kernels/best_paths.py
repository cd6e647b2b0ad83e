"""The tree of the most probable paths through a block with independent places."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton

_INDEX_BITS = 6
"""A rank, and a query token, are below MAX_TREE_TOKENS."""


class BestPaths(NamedTuple):
    """Make the tree of the N best paths of up to K tokens in each of R rows; the token at depth d is one of the W
    choices of place d - 1 (DDTree: best-first search over a block draft's marginals).

    A path's score is the sum of its tokens' log-probabilities, added from the root in fp32. Among equal ones the
    shallower comes first, then the one with the lower rank of the last token, then the one with the earlier parent. So
    a path never comes before its own prefix, and the tree contains all prefixes.

    Read:

    - child_tokens  int64 [R, K, W], contiguous like the others: the W most probable tokens of each place, best first
    - child_scores  fp32 [R, K, W], their log-probabilities, at most 0; -inf for none
    - depths        int32 [R], the most tokens on a row's path, clamped to [0, K]

    Written in place, in the format of TreeBatch, best path first:

    - draft_tokens  int64 [R, N], N below MAX_TREE_TOKENS; -1 after the last if a row has fewer paths
    - parents       int64 [R, N], likewise
    """

    child_tokens: torch.Tensor
    child_scores: torch.Tensor
    depths: torch.Tensor
    draft_tokens: torch.Tensor
    parents: torch.Tensor

    def reference(self) -> None:
        (rows, places, _), count = self.child_scores.shape, self.draft_tokens.shape[1]
        # The N best paths of each depth, in order; above the first depth there is only the root.
        above, first = self.child_scores.new_zeros(rows, 1), -1
        tokens, parents, scores = [], [], []
        for place in range(places):
            # Rank by rank: among equal ones the lower rank comes first.
            grown = (above[:, None] + self.child_scores[:, place, :, None]).flatten(1)
            grown = grown.masked_fill(self.depths[:, None] <= place, -torch.inf)
            best = grown.sort(dim=1, descending=True, stable=True)
            chosen, above_len = best.indices[:, :count], above.shape[1]
            tokens.append(self.child_tokens[:, place].gather(1, chosen // above_len))
            parents.append(first + chosen % above_len)
            above = best.values[:, :count]
            scores.append(above)
            first = sum(each.shape[1] for each in scores[:-1])
        # Depth by depth: among equal ones the shallower comes first.
        best = torch.cat(scores, 1).sort(dim=1, descending=True, stable=True)
        chosen, found = best.indices[:, :count], best.values[:, :count] > -torch.inf
        query_tokens = best.indices.argsort(1) + 1
        above = torch.cat(parents, 1).gather(1, chosen)
        follows = torch.where(above < 0, 0, query_tokens.gather(1, above.clamp(min=0)))
        for out, values in ((self.draft_tokens, torch.cat(tokens, 1).gather(1, chosen)), (self.parents, follows)):
            out.fill_(-1)
            out[:, : chosen.shape[1]] = values.where(found, -1)

    def launch(self) -> None:
        (rows, places, width), count = self.child_scores.shape, self.draft_tokens.shape[1]
        _best_paths_kernel[(rows,)](
            child_tokens_ptr=self.child_tokens,
            child_scores_ptr=self.child_scores,
            depths_ptr=self.depths,
            draft_tokens_ptr=self.draft_tokens,
            parents_ptr=self.parents,
            max_depth=places,
            width=width,
            num_tokens=count,
            INDEX_BITS=_INDEX_BITS,
            BLOCK_P=next_power_of_2(count + 1),
            num_warps=1,
            **dependent_launch(self.draft_tokens.device),
        )


@triton.jit
def _best_paths_kernel(
    child_tokens_ptr,  # int64 [R, K, W]
    child_scores_ptr,  # fp32 [R, K, W]
    depths_ptr,  # int32 [R]
    draft_tokens_ptr,  # out: int64 [R, N]
    parents_ptr,  # out: int64 [R, N]
    max_depth,  # K
    width,  # W
    num_tokens,  # N
    INDEX_BITS: tl.constexpr,  # bits of a rank, and of a query token
    BLOCK_P: tl.constexpr,  # queue capacity, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Pop the best path of a queue num_tokens times; score = parent_score + child_score.

    One program per row. Every popped path pushes two more: its next sibling, and its best child.
    """
    INT32_MAX: tl.constexpr = 2**31 - 1
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    INDEX_MASK: tl.constexpr = (1 << INDEX_BITS) - 1
    depth = tl.minimum(tl.load(depths_ptr + row), max_depth)
    children_start = row * max_depth * width
    offs_p = tl.arange(0, BLOCK_P)
    # The queue starts with the root's best child.
    best_child = tl.load(child_scores_ptr + children_start, mask=depth > 0, other=float("-inf"))
    score = tl.where(offs_p == 0, best_child, float("-inf"))
    # The score of the path without its last token
    parent_score = tl.zeros((BLOCK_P,), tl.float32)
    # The order of equal scores: place, rank and parent in one number
    order = tl.zeros((BLOCK_P,), tl.int32)
    for n in range(0, num_tokens):
        best = tl.max(score, 0)
        found = best > float("-inf")
        taken_order = tl.min(tl.where(score == best, order, INT32_MAX), 0)
        taken = (score == best) & (order == taken_order)
        place = taken_order >> (2 * INDEX_BITS)
        rank = (taken_order >> INDEX_BITS) & INDEX_MASK
        child_offs = children_start + place * width + rank
        token = tl.load(child_tokens_ptr + child_offs, mask=found, other=-1)
        tl.store(draft_tokens_ptr + row * num_tokens + n, token)
        tl.store(parents_ptr + row * num_tokens + n, tl.where(found, taken_order & INDEX_MASK, -1).to(tl.int64))
        # The next sibling takes its queue entry. A rank past the last carries into the place, but is never popped.
        taken_parent_score = tl.sum(tl.where(taken, parent_score, 0.0), 0)
        child_score = tl.load(child_scores_ptr + child_offs + 1, mask=found & (rank + 1 < width), other=float("-inf"))
        score = tl.where(taken, taken_parent_score + child_score, score)
        order = tl.where(taken, taken_order + (1 << INDEX_BITS), order)
        # The best child goes to a new entry.
        has_child = found & (place + 1 < depth)
        child_offs = children_start + (place + 1) * width
        child_score = tl.load(child_scores_ptr + child_offs, mask=has_child, other=float("-inf"))
        is_new = offs_p == n + 1
        score = tl.where(is_new, best + child_score, score)
        parent_score = tl.where(is_new, best, parent_score)
        order = tl.where(is_new, ((place + 1) << (2 * INDEX_BITS)) | (n + 1), order)


best_paths = define_op("spec_decode::best_paths", BestPaths, mutates=("draft_tokens", "parents"))
