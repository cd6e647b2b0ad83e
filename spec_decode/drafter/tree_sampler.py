"""Samplers of draft trees, grown from the logits of every step or from those of one block."""

from __future__ import annotations

import torch

from spec_decode.sampling.draft_sampler import DraftSettings
from spec_decode.trees import BlockTree, DynamicTree, DynamicTreeConfig, StaticTree, Tree


class TreeSampler(DraftSettings):
    """Grows the trees of R requests, each with N draft tokens and at most K deep, in buffers with fixed addresses.

    Inputs: DraftSettings; seeds are not read. draft_lens and num_tokens bound the length of a path. Outputs:

    - draft_tokens   int64 [R, N], -1 after a row's last
    - parents        int64 [R, N], in the format of TreeBatch
    - draft_logits   fp32 [R, 0, V]: verification needs none
    - continue_flag  int32 [1], 1 if some row's tree can grow deeper, else 0
    """

    parents: torch.Tensor

    def __init__(
        self,
        shape: Tree,
        step: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        num_speculative_tokens: int,
        vocab_size: int,
        token_map: torch.Tensor | None,
    ) -> None:
        """step, seq_lens: from the batch of the later steps, read at every step. A row of seq_len 0 has no later steps.

        Raises BatchError for a tree that does not fit K.
        """
        rows, device = len(seq_lens), seq_lens.device
        super().__init__(rows, num_speculative_tokens, device)
        self.tree: DynamicTree | StaticTree
        if isinstance(shape, DynamicTreeConfig):
            self.tree = DynamicTree(
                rows, step, shape, num_speculative_tokens=num_speculative_tokens, token_map=token_map
            )
        else:
            self.tree = StaticTree(
                rows, step, shape, num_speculative_tokens=num_speculative_tokens, token_map=token_map
            )
        self.draft_tokens, self.parents = torch.full((2, rows, self.tree.num_tokens), -1, device=device)
        self.draft_logits = torch.zeros(rows, 0, vocab_size, device=device)
        self._step, self._seq_lens = step, seq_lens

    def __call__(self, logits: torch.Tensor, step_0_lens: torch.Tensor) -> None:
        """Grow the trees of the first rows in place; device work only.

        - logits       [rows, F, V of the draft]: see DynamicTree.grow
        - step_0_lens  int32 [rows], seq_lens of step 0; a row of 0 proposes nothing

        Raises BatchError, with nothing changed, for logits that do not match the frontier.
        """
        self.tree.grow(logits, temperature=self.temperature[: len(logits)])
        self.keep(step_0_lens)

    def keep(self, step_0_lens: torch.Tensor) -> None:
        """Write the trees of the first rows, as grown since step 0, to the outputs: see __call__."""
        rows = len(step_0_lens)
        lens = torch.minimum(self.draft_lens[:rows], self.num_tokens)
        lens = lens.where(self._seq_lens[:rows] > 0, lens.clamp(max=1)).masked_fill(step_0_lens == 0, 0)
        kept = self.tree.kept(lens)
        self.draft_tokens[:rows].copy_(kept.draft_tokens)
        self.parents[:rows].copy_(kept.parents)
        self.continue_flag.copy_((lens > self._step + 1).any())


class BlockTreeSampler(DraftSettings):
    """Replaces a DraftSampler if the tokens of a block become trees; its buffers have fixed addresses.

    Inputs: DraftSettings; seeds are not read. draft_lens and num_tokens bound the length of a path. Outputs: those of
    a TreeSampler, but continue_flag is never set.
    """

    parents: torch.Tensor

    def __init__(
        self,
        shape: Tree,
        seq_lens: torch.Tensor,
        *,
        num_speculative_tokens: int,
        vocab_size: int,
        token_map: torch.Tensor | None,
    ) -> None:
        """seq_lens: int32 [R] from the step's batch, read at every step; a row of 0 proposes nothing.

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
        """Make the trees of the first rows in place; device work only.

        - logits     [rows * K, V of the draft]: see BlockTree.grow
        - positions  [rows * K], of the draft's inputs: values not read, since no noise is drawn

        Raises BatchError, with nothing changed, for logits of the wrong shape.
        """
        rows = len(positions) // self.tree.num_places
        depths = torch.minimum(self.draft_lens[:rows], self.num_tokens).masked_fill(self._seq_lens[:rows] == 0, 0)
        self.tree.grow(logits, depths, self.temperature[:rows])
