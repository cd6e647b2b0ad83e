"""The device work of a round that drafts trees by a block whose tokens shift the logits after them."""

from __future__ import annotations

import torch

from builders import BatchBuffers
from spec_decode.drafter.steps.context_block_step import ContextBlockStep
from spec_decode.drafter.tree_sampler import TreeSampler
from spec_decode.models import InTurnBlockDraft


class InTurnTreeStep(ContextBlockStep):
    """A block whose places are steps of a tree's growth: each token on a frontier shifts the logits of the next place
    in its own way, so that they are those of its own path. No forward but the block's runs."""

    model: InTurnBlockDraft
    sampler: TreeSampler

    def _make_sampler(self, batch: BatchBuffers) -> TreeSampler:
        return self._tree_sampler(batch.step, batch.seq_lens)

    def _sample(self, drafted: torch.Tensor, places: torch.Tensor) -> None:
        logits = self.logits(drafted).unflatten(0, places.shape)
        with self.products():
            self._grow(logits)

    def _grow(self, logits: torch.Tensor) -> None:
        """Grow the trees by logits [rows, K, V of the draft], a place after the other."""
        rows, batch, sampler = len(logits), self.extend.batch, self.sampler
        frontier = self.inputs.next_tokens[:rows, None]
        for place in range(self.num_speculative_tokens):
            batch.step.fill_(place)
            shift = self.model.bias_after(frontier.flatten()).unflatten(0, frontier.shape)
            sampler.tree.grow(logits[:, place, None] + shift)
            frontier = sampler.tree.frontier_tokens[:rows]
        sampler.keep(batch.seq_lens[:rows])
