"""Trees of one fixed shape for all requests."""

from __future__ import annotations

import torch

from spec_decode.trees.draft_tree import DraftTree, PlacedTree, TreeBatch
from spec_decode.trees.dynamic_tree import require_frontier, target_ids
from spec_decode.trees.kernels.top_children import top_children


class StaticTree:
    """The trees of R requests, all in the shape of a DraftTree: child r of a token is the draft's r-th most probable
    token after it.

    A frontier holds the tokens of one depth that have children. No token is drawn at random, so TreeSampling verifies
    the trees. All buffers have fixed addresses, and every method is device work of fixed shape. For the next step:

    - frontier_tokens  int64 [R, W], the tokens to draft from; if a depth has fewer than W, the last ones are not used
    - frontier_places  int64 [R, W], for each token, its parent's index on the previous frontier
    """

    def __init__(
        self,
        rows: int,
        step: torch.Tensor,
        tree: DraftTree,
        *,
        num_speculative_tokens: int,
        token_map: torch.Tensor | None = None,
    ) -> None:
        """Allocate the buffers: see DynamicTree. Raises BatchError for a tree that does not fit K."""
        tree.require_depth(num_speculative_tokens)
        tree = tree.by_depth()
        places, device = _Places(tree, num_speculative_tokens), step.device
        self.width, self.num_tokens = places.width, tree.num_tokens
        self._step, self._token_map, self._choices = step, token_map, tree.max_children
        self._children = torch.zeros(
            rows, num_speculative_tokens, self.width, self._choices, dtype=torch.int64, device=device
        )
        self.frontier_tokens, self.frontier_places = torch.zeros(2, rows, self.width, dtype=torch.int64, device=device)
        self._next_places, self._next_ranks = places.next_places.to(device), places.next_ranks.to(device)
        self._placed = PlacedTree(tree, places.sources, rows, device)

    def grow(
        self, logits: torch.Tensor, choices: torch.Tensor | None = None, temperature: torch.Tensor | None = None
    ) -> None:
        """Grow the trees of the first rows by a step's logits, in place: see DynamicTree.grow; temperature is ignored.

        Raises BatchError, with nothing changed, for too many rows, the wrong frontier or too few tokens.
        """
        rows = require_frontier(logits, self.frontier_tokens, self._choices)
        tokens = top_children(logits.flatten(0, 1), self._choices, None)[0]
        tokens = target_ids(tokens, self._token_map, choices)
        found = tokens.view(rows, 1, -1, self._choices)
        if found.shape[2] < self.width:
            found = found.expand(-1, -1, self.width, -1)
        self._children[:rows].index_copy_(1, self._step, found)
        places, ranks = (table[self._step][0] for table in (self._next_places, self._next_ranks))
        self.frontier_places[:rows].copy_(places.expand(rows, -1))
        self.frontier_tokens[:rows].copy_(found[:, 0].flatten(1)[:, places * self._choices + ranks])

    def kept(self, draft_lens: torch.Tensor | None = None) -> TreeBatch:
        """Return the trees of the first rows: see DynamicTree.kept."""
        children = self._children if draft_lens is None else self._children[: len(draft_lens)]
        return self._placed.rows(children.flatten(1), draft_lens)


class _Places:
    """Where a tree's tokens are drafted, for K steps with frontiers of at most W tokens.

    - next_places  int64 [K, W], for each token of the frontier after a step, its parent's index on the frontier before
    - next_ranks   int64 [K, W], its index among its parent's children
    - sources      for each draft token, its place among the children [K, W, max_children] of all steps
    """

    def __init__(self, tree: DraftTree, num_speculative_tokens: int) -> None:
        depths, choices = tree.depths, tree.max_children
        inner = [[t for t in sorted(set(tree.parents)) if depths[t] == depth] for depth in range(tree.max_depth)]
        self.width = tree.width
        place = {token: at for of_depth in inner for at, token in enumerate(of_depth)}
        rank = dict(enumerate(tree.ranks, 1))
        above = {1 + i: place[parent] for i, parent in enumerate(tree.parents)}
        self.next_places, self.next_ranks = torch.zeros(2, num_speculative_tokens, self.width, dtype=torch.int64)
        for step, frontier in enumerate(inner[1:]):
            for at, token in enumerate(frontier):
                self.next_places[step, at], self.next_ranks[step, at] = above[token], rank[token]
        tokens = range(1, 1 + tree.num_tokens)
        self.sources = [((depths[token] - 1) * self.width + above[token]) * choices + rank[token] for token in tokens]
