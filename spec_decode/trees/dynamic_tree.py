"""Trees that grow with the draft: each request's own, of the paths that the draft finds most probable."""

from __future__ import annotations

import torch

from builders.errors import require, require_tensor
from builders.spec import MAX_TREE_TOKENS
from spec_decode.trees.draft_tree import require_tree_size
from spec_decode.trees.kernels.grow_tree import grow_tree
from spec_decode.trees.kernels.keep_best import keep_best
from spec_decode.trees.kernels.top_children import top_children
from spec_decode.trees.verification import TreeBatch


class DynamicTree:
    """The trees of R requests (EAGLE-2, Li et al., 2024): each of K steps drafts the W most probable children of every
    token on its frontier, the W best paths among them are the next frontier, and in the end the N best of all are kept.

    A path is as good as the product of its tokens' probabilities under softmax of the draft's logits; chance plays no
    part, so verification is TreeSampling's. All buffers keep their addresses, and every method is device work of fixed
    shape. For the next step, of R rows and W tokens on the frontier:

    - frontier_tokens  int64 [R, W], the tokens to draft from
    - frontier_places  int64 [R, W], on the frontier before, the token that each follows
    - frontier_scores  fp32 [R, W], their paths' log-probabilities; -inf where fewer paths are possible
    - frontier         int64 [R, W], which candidates they are

    And of all C = W + (K - 1) * W * W candidates, in the order they were drafted in:

    - tokens           int64 [R, C]
    - parents          int64 [R, C], the candidate that each follows; -1 is the root
    - scores           fp32 [R, C]
    """

    def __init__(
        self, rows: int, step: torch.Tensor, *, num_speculative_tokens: int, width: int, num_tokens: int
    ) -> None:
        """Allocate the buffers.

        - rows                    R
        - step                    int64 [1], 0 to K - 1, the batch's own, read at every step
        - num_speculative_tokens  K, as deep as a tree can be
        - width                   W
        - num_tokens              N, draft tokens that are verified

        Raises BatchError for sizes of which no tree can be made.
        """
        candidates = width + (num_speculative_tokens - 1) * width * width
        require(
            1 <= width <= MAX_TREE_TOKENS,
            f"a dynamic tree must have 1 to {MAX_TREE_TOKENS} choices a step, got {width}; no path could be drafted. "
            "Pass such a width.",
        )
        require_tree_size(num_tokens)
        require(
            num_tokens <= candidates,
            f"a tree must keep at most the {candidates} candidates that {num_speculative_tokens} steps of {width} "
            f"choices draft, got {num_tokens}; some would never be there. Keep fewer, or draft more.",
        )
        device = step.device
        self.rows, self.width, self._num_tokens, self._step = rows, width, num_tokens, step
        self.tokens = torch.zeros(rows, candidates, dtype=torch.int64, device=device)
        self.parents = torch.full((rows, candidates), -1, dtype=torch.int64, device=device)
        self.scores = torch.full((rows, candidates), -torch.inf, device=device)
        self.frontier, self.frontier_tokens, self.frontier_places = torch.zeros(
            3, rows, width, dtype=torch.int64, device=device
        )
        self.frontier_scores = torch.full((rows, width), -torch.inf, device=device)

    def grow(self, logits: torch.Tensor) -> None:
        """Take the step's logits, in place.

        - logits  [R, V] any float, of the root, at step 0; [R * W, V], of the frontier, at the others

        Raises BatchError, with nothing changed, for logits of another number of rows or of fewer tokens than W.
        """
        require_tensor("logits", logits, shape=(None, None), dtype=logits.dtype, device=self.tokens.device)
        counts = (self.rows, self.rows * self.width)
        require(
            len(logits) in counts,
            f"a step must have logits of {counts[0]} or {counts[1]} rows, got {len(logits)}; they are "
            "of another frontier, so nothing was changed. Pass a row for each token on it.",
        )
        require(
            logits.shape[1] >= self.width,
            f"logits must be of at least {self.width} tokens, got {logits.shape[1]}; there are no more choices, so "
            "nothing was changed. Use a smaller width.",
        )
        children = (each.view(self.rows, -1, self.width) for each in top_children(logits, self.width))
        grow_tree(
            self._step, *children, self.tokens, self.parents, self.scores,
            self.frontier, self.frontier_scores, self.frontier_tokens, self.frontier_places,
        )  # fmt: skip

    def kept(self) -> TreeBatch:
        """The N best paths of each row, of the steps that were taken since step 0."""
        return TreeBatch(*keep_best(self.tokens, self.parents, self.scores, self._num_tokens))
