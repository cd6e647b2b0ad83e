"""Dynamic trees: each request's tree grows along the paths that its draft finds most probable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from builders.errors import require, require_tensor
from builders.spec import MAX_TREE_TOKENS
from spec_decode.trees.draft_tree import DraftTree, TreeBatch, require_frontiers, require_tree_size
from spec_decode.trees.kernels.grow_tree import GrowTree, grow_tree
from spec_decode.trees.kernels.keep_best import keep_best
from spec_decode.trees.kernels.top_children import top_children

_MIN_PATH_TEMPERATURE = 0.5
"""Paths of requests below this temperature are scored at it. With greedy trees of 8 choices and 16 tokens from its
DFlash draft, the shipped pair accepts 4.40 tokens a round if scored at 1, 4.97 at 1/2, 4.98 at 1/3, 4.84 at 1/5."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicTreeConfig:
    """How a dynamic tree grows.

    - width       W, paths that each step extends, and tokens that it drafts after each path
    - num_tokens  N, draft tokens to verify

    Raises BatchError for sizes that no tree can have.
    """

    width: int
    num_tokens: int

    def __post_init__(self) -> None:
        require(
            type(self.width) is int and 1 <= self.width <= MAX_TREE_TOKENS,
            f"width must be an integer from 1 to {MAX_TREE_TOKENS}, got {self.width!r}. Pass the choices per step.",
        )
        require_tree_size(self.num_tokens)

    @property
    def max_children(self) -> int:
        """The most draft tokens that follow one query token: W."""
        return self.width

    def require_depth(self, num_speculative_tokens: int) -> None:
        """Raise BatchError if paths of this many tokens, with W choices each, are too few to fill the tree."""
        paths = 0
        for _ in range(num_speculative_tokens):
            # Stop counting past the size of any tree.
            paths = min(MAX_TREE_TOKENS, (paths + 1) * self.width)
        require(
            self.num_tokens <= paths,
            f"num_tokens is {self.num_tokens}, more than the {paths} paths of {num_speculative_tokens} tokens with "
            f"{self.width} choices each. Keep fewer, or draft more.",
        )

    def require_steps(self, num_speculative_tokens: int) -> None:
        """Raise BatchError if this many steps, each from a frontier of W tokens, draft too few to fill the tree."""
        self.require_depth(num_speculative_tokens)
        steps, width = num_speculative_tokens - 1, self.width
        candidates = width + steps * width * width
        require(
            self.num_tokens <= candidates,
            f"num_tokens is {self.num_tokens}, more than the {candidates} candidates of {num_speculative_tokens} steps "
            f"with {width} choices. Keep fewer, or draft more.",
        )

    def require_frontiers(self, num_speculative_tokens: int) -> None:
        """Raise BatchError unless a draft that runs over all frontiers can hold them in its masks."""
        require_frontiers(self.width, num_speculative_tokens)


Tree: TypeAlias = DraftTree | DynamicTreeConfig
"""The shape of the trees to draft: fixed, or grown for each request."""


class DynamicTree:
    """The trees of R requests (EAGLE-2, Li et al., 2024). Each of K steps drafts the W most probable children of every
    token on its frontier. The ends of the W best paths among them are the next frontier. After the last step, the N
    best tokens of all steps are kept.

    A path's score is the product of its tokens' probabilities under softmax of the draft's logits, at the temperature
    of `path_temperature`. No token is drawn at random, so TreeSampling verifies the trees. All buffers have fixed
    addresses, and every method is device work of fixed shape. For the next step, with R rows and W tokens on the
    frontier:

    - frontier_tokens  int64 [R, W], the tokens to draft from
    - frontier_places  int64 [R, W], for each token, its parent's index on the previous frontier
    - frontier_scores  fp32 [R, W], the log-probabilities of their paths; -inf if there are fewer paths
    - frontier         int64 [R, W], their candidate indices

    For all C = W + (K - 1) * W * W candidates, in the order in which they were drafted:

    - tokens           int64 [R, C]
    - parents          int64 [R, C], the candidate that each follows; -1 is the root
    - scores           fp32 [R, C]
    """

    def __init__(
        self,
        rows: int,
        step: torch.Tensor,
        config: DynamicTreeConfig,
        *,
        num_speculative_tokens: int,
        token_map: torch.Tensor | None = None,
    ) -> None:
        """Allocate the buffers.

        - rows                    R
        - step                    int64 [1], 0 to K - 1, the batch's tensor, read at every step
        - num_speculative_tokens  K, the greatest depth of a tree
        - token_map               int64 [V of the draft], the target id of each token that the draft's logits score

        Raises BatchError for a config that does not fit K.
        """
        config.require_steps(num_speculative_tokens)
        width, device = config.width, step.device
        candidates = width + (num_speculative_tokens - 1) * width * width
        self.width, self.num_tokens = width, config.num_tokens
        self._step, self._token_map = step, token_map
        self.tokens = torch.zeros(rows, candidates, dtype=torch.int64, device=device)
        self.parents = torch.full((rows, candidates), -1, dtype=torch.int64, device=device)
        self.scores = torch.full((rows, candidates), -torch.inf, dtype=torch.float32, device=device)
        self.frontier, self.frontier_tokens, self.frontier_places = torch.zeros(
            3, rows, width, dtype=torch.int64, device=device
        )
        self.frontier_scores = torch.full((rows, width), -torch.inf, dtype=torch.float32, device=device)
        later = (torch.arange(candidates, device=device) - width).div(width * width, rounding_mode="floor")
        self._depths = later.clamp_(min=-1) + 2

    def grow(
        self, logits: torch.Tensor, choices: torch.Tensor | None = None, temperature: torch.Tensor | None = None
    ) -> None:
        """Grow the trees of the first rows by a step's logits, in place.

        - logits       [rows, 1, V of the draft] any float, of the root, at step 0; [rows, W, V], of the frontier, later
        - choices      int64 [rows, V]: the target id of each token that a row's logits score, if rows differ in these
        - temperature  fp32 [rows], of the requests, 0 is greedy; None is 1 for all

        Raises BatchError, with nothing changed, for too many rows, the wrong frontier or fewer tokens than W.
        """
        rows = require_frontier(logits, self.frontier, self.width)
        if temperature is not None:
            temperature = path_temperature(temperature, logits.shape[1])
        tokens, scores = top_children(logits.flatten(0, 1), self.width, temperature)
        tokens = target_ids(tokens, self._token_map, choices)
        shape = (rows, -1, self.width)
        arguments = GrowTree(
            step=self._step,
            child_tokens=tokens.view(shape),
            child_scores=scores.view(shape),
            tokens=self.tokens[:rows],
            parents=self.parents[:rows],
            scores=self.scores[:rows],
            frontier=self.frontier[:rows],
            frontier_scores=self.frontier_scores[:rows],
            frontier_tokens=self.frontier_tokens[:rows],
            frontier_places=self.frontier_places[:rows],
        )
        grow_tree(*arguments)

    def kept(self, draft_lens: torch.Tensor | None = None) -> TreeBatch:
        """Return the N best paths of the first rows, over the steps since step 0.

        - draft_lens  int [rows], the most tokens on a row's path; None returns all rows, with no limit
        """
        rows, scores = len(self.scores), self.scores
        if draft_lens is not None:
            rows = len(draft_lens)
            scores = scores[:rows].masked_fill(self._depths > draft_lens[:, None], -torch.inf)
        return TreeBatch(*keep_best(self.tokens[:rows], self.parents[:rows], scores, self.num_tokens))


def path_temperature(temperature: torch.Tensor, num_places: int) -> torch.Tensor:
    """Return the temperature fp32 [rows * num_places] for scoring the places of each row's paths: that of the target,
    fp32 [rows], 0 for greedy, but at least _MIN_PATH_TEMPERATURE.

    A greedy target always takes its likeliest token, but the draft is less certain which one that is.
    """
    return temperature[:, None].clamp(min=_MIN_PATH_TEMPERATURE).expand(-1, num_places).flatten()


def target_ids(tokens: torch.Tensor, token_map: torch.Tensor | None, choices: torch.Tensor | None) -> torch.Tensor:
    """Return the target ids of the draft's tokens [rows * F, W]: by a map per row, by one map, or unchanged."""
    if choices is not None:
        return choices.gather(1, tokens.view(len(choices), -1)).view_as(tokens)
    return tokens if token_map is None else token_map[tokens]


def require_frontier(logits: torch.Tensor, frontier: torch.Tensor, num_choices: int) -> int:
    """Return the number of rows of a step's logits [rows, F, V]. Raises BatchError for more rows than the frontier
    [R, W] has, an F other than 1 or W, and fewer than num_choices tokens."""
    require_tensor("logits", logits, shape=(None, None, None), dtype=logits.dtype, device=frontier.device)
    (rows, places, vocab), (most, width) = logits.shape, frontier.shape
    require(
        1 <= rows <= most and places in (1, width),
        f"logits must have 1 to {most} rows, of the root or the {width} tokens of a frontier, got "
        f"{list(logits.shape)}. Pass a row for each token of the frontier.",
    )
    require(
        vocab >= num_choices,
        f"logits must have at least {num_choices} tokens, one per choice, got {vocab}. Use a smaller width.",
    )
    return rows
