"""The draft tokens of trees, one tree a request, as tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.errors import require_tensor
from spec_decode.trees.draft_tree import require_tree_size


class TreeBatch(NamedTuple):
    """The trees of R requests, each of up to N draft tokens.

    - draft_tokens  int64 [R, N]
    - parents       int64 [R, N], as in DraftTree; the first value that is no parent ends the row's tree
    """

    draft_tokens: torch.Tensor
    parents: torch.Tensor

    def checked(self, target_logits: torch.Tensor) -> TreeBatch:
        """These, contiguous. Raises BatchError for tensors, or target_logits, of another shape, dtype or device, and
        for more tokens than a tree may have."""
        (rows, tokens), device = self.draft_tokens.shape, target_logits.device
        for name, tensor in self._asdict().items():
            require_tensor(name, tensor, shape=(rows, tokens), dtype=torch.int64, device=device)
        shape, dtype = (rows, 1 + tokens, None), target_logits.dtype
        require_tensor("target_logits", target_logits, shape=shape, dtype=dtype, device=device)
        require_tree_size(tokens, f"room for {tokens}")
        return TreeBatch(self.draft_tokens.contiguous(), self.parents.contiguous())
