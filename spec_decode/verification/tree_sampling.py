"""Tree verification: the accepted path of each request's tree and the target's next token, without a host sync."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from builders.errors import require, require_counts, require_tensor
from spec_decode.sampling.parameters import Sampling
from spec_decode.sampling.target_sampler import sample_target
from spec_decode.trees.draft_tree import TreeBatch
from spec_decode.trees.kernels.ancestor_masks import ancestor_masks
from spec_decode.verification.kernels.follow_tree import follow_tree


@dataclass(frozen=True, slots=True)
class TreeVerifyOutput:
    """The accepted paths of R trees, at most K draft tokens deep.

    - accepted     int64 [R], number of accepted draft tokens
    - path         int64 [R, K], their query tokens, starting at the root's child; -1 after the last
    - next_tokens  int64 [R], the target's own token after them; -1 as in VerifyOutput
    """

    accepted: torch.Tensor
    path: torch.Tensor
    next_tokens: torch.Tensor


class TreeSampling:
    """Draws the target's token after every query token, as plain decoding would, and follows these down the tree.

    The text is that of plain decoding with the same seeds, token for token, at any temperature and for any trees,
    however they were chosen. Temperature 0 accepts the target's argmax tokens.
    """

    def __init__(self, max_depth: int) -> None:
        """max_depth: K, the greatest depth of a tree. Raises BatchError for a K that is not an int of 1 or more."""
        require_counts("max_depth", (max_depth,))
        require(max_depth >= 1, f"max_depth must be 1 or more, got {max_depth}. Pass the draft's K.")
        self._max_depth = max_depth

    def verify(
        self, target_logits: torch.Tensor, trees: TreeBatch, *, sampling: Sampling, draft_positions: torch.Tensor
    ) -> TreeVerifyOutput:
        """Return the accepted path of each row, and the token after it. Device work only, fixed shapes, no host sync.

        - target_logits    [R, 1 + N, V] any float: for each query token, the logits of the token after it
        - sampling         R rows
        - draft_positions  int64 [R], absolute position of the root's children

        Raises BatchError for tensors of the wrong shape, dtype or device.
        """
        draft_tokens, parents = trees.checked(target_logits)
        shape, device = (len(parents),), parents.device
        require_tensor("draft_positions", draft_positions, shape=shape, dtype=torch.int64, device=device)
        positions = draft_positions[:, None] + ancestor_masks(parents)[1]
        drawn = sample_target(
            target_logits, sampling=sampling, positions=positions, draft_tokens=draft_tokens, parents=parents
        )
        return TreeVerifyOutput(*follow_tree(draft_tokens, parents, drawn, self._max_depth))
