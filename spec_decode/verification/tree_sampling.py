"""Which path of each request's tree the target accepts, and the token it adds. All on the device, no host read."""

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
    """What is accepted of R trees, K draft tokens deep at most.

    - accepted     int64 [R], draft tokens accepted
    - path         int64 [R, K], their query tokens from the root's child on; -1 after the last
    - next_tokens  int64 [R], the target's own token after them
    """

    accepted: torch.Tensor
    path: torch.Tensor
    next_tokens: torch.Tensor


class TreeSampling:
    """Draws the target's token after every query token, as plain decoding would there, and follows those down the tree.

    The text is plain decoding's of the same seeds, token for token, at any temperature, whatever the trees: how they
    were chosen may depend on anything. Temperature 0 accepts tokens that are the target's argmax.
    """

    def __init__(self, max_depth: int) -> None:
        """max_depth: K, no tree is deeper. Raises BatchError for a K that is no int of 1 or more."""
        require_counts("the depth of trees", (max_depth,))
        require(max_depth >= 1, f"the depth of trees must be 1 or more, got {max_depth}. Pass the draft's K.")
        self._max_depth = max_depth

    def verify(
        self, target_logits: torch.Tensor, trees: TreeBatch, *, sampling: Sampling, draft_positions: torch.Tensor
    ) -> TreeVerifyOutput:
        """Which path of each row is accepted, and the token after it. Device work only, fixed shapes, no host read.

        - target_logits    [R, 1 + N, V] any float: of query token j, the logits of the token after it
        - sampling         R rows
        - draft_positions  int64 [R], absolute position of the root's children

        Raises BatchError for tensors of another shape, dtype or device.
        """
        draft_tokens, parents = trees.checked(target_logits)
        shape, device = (len(parents),), parents.device
        require_tensor("draft_positions", draft_positions, shape=shape, dtype=torch.int64, device=device)
        positions = draft_positions[:, None] + ancestor_masks(parents)[1]
        drawn = sample_target(target_logits, sampling=sampling, positions=positions)
        return TreeVerifyOutput(*follow_tree(draft_tokens, parents, drawn, self._max_depth))
