"""What a round of trees drafts by a block: each request's tree, of the logits of one step."""

from __future__ import annotations

import torch

from spec_decode.sampling.draft_settings import DraftSettings
from spec_decode.trees import BlockTree, DraftTree, DynamicTreeConfig


class BlockTreeSampler(DraftSettings):
    """Takes the place of a DraftSampler where a block's tokens become trees, in buffers that keep their addresses.

    Inputs: DraftSettings, of which seeds are not read. A token's path is at most as long as draft_lens
    and num_tokens say. Outputs: those of a TreeSampler, but that no row ever drafts on.
    """

    parents: torch.Tensor

    def __init__(
        self,
        shape: DraftTree | DynamicTreeConfig,
        seq_lens: torch.Tensor,
        *,
        num_speculative_tokens: int,
        vocab_size: int,
        token_map: torch.Tensor | None,
    ) -> None:
        """seq_lens: int32 [R] of the step's batch, read at every step; a row of 0 proposes nothing.

        Raises BatchError for a tree that does not fit K.
        """
        rows, device = len(seq_lens), seq_lens.device
        super().__init__(rows, num_speculative_tokens, device)
        self.tree = BlockTree(
            rows, shape, num_speculative_tokens=num_speculative_tokens, device=device, token_map=token_map
        )
        self.draft_tokens, self.parents = self.tree.draft_tokens, self.tree.parents
        self.draft_logits = torch.zeros(rows, 0, vocab_size, device=device)
        self._seq_lens = seq_lens

    def sample_block(self, logits: torch.Tensor, positions: torch.Tensor) -> None:
        """Make the first rows' trees, in place; device work only.

        - logits     [rows * K, V of the draft]: see BlockTree.grow
        - positions  of the draft's inputs, [rows * K]: not read, since no noise is drawn

        Raises BatchError, with nothing changed, for logits of another shape.
        """
        rows = len(positions) // self.tree.num_places
        depths = torch.minimum(self.draft_lens[:rows], self.num_tokens).masked_fill(self._seq_lens[:rows] == 0, 0)
        self.tree.grow(logits, depths, self.temperature[:rows])
