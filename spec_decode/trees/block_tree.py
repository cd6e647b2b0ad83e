"""Trees of a draft that proposes a block at once, from the choices at each place."""

from __future__ import annotations

import torch

from builders.errors import require, require_tensor
from spec_decode.trees.draft_tree import DraftTree, PlacedTree
from spec_decode.trees.dynamic_tree import Tree, path_temperature
from spec_decode.trees.kernels.best_paths import best_paths
from spec_decode.trees.kernels.top_children import top_children


class BlockTree:
    """The trees of R requests, made from the K distributions that one step of a block draft returns, one per position.

    The distributions do not depend on the tokens chosen at other positions, so all tokens of one depth have the same
    children. With a DynamicTreeConfig, a row has the N most probable of all paths through the W most probable tokens of
    each position (DDTree), at the temperature of `path_temperature`. With a DraftTree, child r of a token is the r-th
    most probable token of its position. No token is drawn at random, so TreeSampling verifies the trees. All buffers
    have fixed addresses, and `grow` is device work of fixed shape:

    - draft_tokens  int64 [R, N], -1 after a row's last
    - parents       int64 [R, N], in the format of TreeBatch

    num_places: K.
    """

    def __init__(
        self,
        rows: int,
        shape: Tree,
        *,
        num_speculative_tokens: int,
        device: torch.device,
        token_map: torch.Tensor | None = None,
    ) -> None:
        """Allocate the buffers.

        - rows                    R
        - num_speculative_tokens  K
        - token_map               int64 [V of the draft], the target id of each token that the draft's logits score

        Raises BatchError for a shape that does not fit K.
        """
        shape.require_depth(num_speculative_tokens)
        self.num_places, self._token_map = num_speculative_tokens, token_map
        self._choices = shape.max_children
        self._placed: PlacedTree | None = None
        if isinstance(shape, DraftTree):
            tree = shape.by_depth()
            places = [(d - 1) * self._choices + rank for d, rank in zip(tree.depths[1:], tree.ranks, strict=True)]
            self._placed = PlacedTree(tree, places, rows, device)
        self.draft_tokens, self.parents = torch.full((2, rows, shape.num_tokens), -1, device=device)

    def grow(self, logits: torch.Tensor, depths: torch.Tensor, temperature: torch.Tensor | None = None) -> None:
        """Make the trees of the first rows, in place.

        - logits       [rows * K, V of the draft] any float: position k of row r is at r * K + k
        - depths       int32 [rows], the most tokens on a row's longest path, clamped to [0, K]
        - temperature  fp32 [rows], of the requests, 0 is greedy; None is 1 for all

        Raises BatchError, with nothing changed, for tensors of the wrong shape and fewer tokens than choices.
        """
        rows, places, device = len(depths), self.num_places, self.parents.device
        require_tensor("depths", depths, shape=(rows,), dtype=torch.int32, device=device)
        require_tensor("logits", logits, shape=(rows * places, None), dtype=logits.dtype, device=device)
        require(
            rows <= len(self.parents) and logits.shape[1] >= self._choices,
            f"logits must be of at most {len(self.parents)} trees and at least {self._choices} tokens, got {rows} "
            f"trees of {logits.shape[1]} tokens. Make a BlockTree for them.",
        )
        if temperature is not None:
            require_tensor("temperature", temperature, shape=(rows,), dtype=torch.float32, device=device)
            temperature = path_temperature(temperature, places)
        tokens, scores = top_children(logits, self._choices, temperature)
        if self._token_map is not None:
            tokens = self._token_map[tokens]
        tokens, draft_tokens, parents = tokens.view(rows, places, -1), self.draft_tokens[:rows], self.parents[:rows]
        if self._placed is None:
            best_paths(tokens, scores.view(rows, places, -1), depths.contiguous(), draft_tokens, parents)
        else:
            placed = self._placed.rows(tokens.flatten(1), depths)
            draft_tokens.copy_(placed.draft_tokens)
            parents.copy_(placed.parents)
