"""The round of a draft that grows trees from one block, in which each token shifts the logits after it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TypeAlias

import torch

from spec_decode.drafter.steps.context_block_step import ContextBlockStep
from spec_decode.drafter.tree_sampler import TreeSampler
from spec_decode.model_api import InTurnBlockDraft, SelectingBlockDraft
from spec_decode.trees.kernels.top_children import top_children

PlaceLogits: TypeAlias = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""Takes a place of the block and the tokens before it, int64 [rows, F]; returns logits and choices for a tree's
`grow`."""


class _GrowingStep(ContextBlockStep):
    """Grows a tree by one level per place of a block: each frontier token shifts the logits of the next place, so every
    path has its own. The only forward is the block's."""

    sampler: TreeSampler

    def _make_sampler(self) -> TreeSampler:
        return self._tree_sampler(self.step_0.batch)

    def _sample(self, drafted: torch.Tensor, places: torch.Tensor) -> None:
        rows, batch, sampler = len(places), self.step_0.batch, self.sampler
        frontier = self.inputs.next_tokens[:rows, None]
        with self.products():
            logits_after = self._place_logits(drafted, rows)
            for place in range(self.num_speculative_tokens):
                batch.step.fill_(place)
                sampler.tree.grow(*logits_after(place, frontier), sampler.temperature[:rows])
                frontier = sampler.tree.frontier_tokens[:rows]
        sampler.keep(batch.seq_lens[:rows])

    @abstractmethod
    def _place_logits(self, drafted: torch.Tensor, rows: int) -> PlaceLogits:
        """Return the function for the logits of each place of the block; drafted [rows * K, H]."""


class InTurnTreeStep(_GrowingStep):
    """For a draft in which a token shifts all logits of the next place."""

    model: InTurnBlockDraft

    def _place_logits(self, drafted: torch.Tensor, rows: int) -> PlaceLogits:
        logits = self.logits(drafted).unflatten(0, (rows, -1))

        def after(place: int, frontier: torch.Tensor) -> tuple[torch.Tensor, None]:
            shift = self.model.bias_after(frontier.flatten()).unflatten(0, frontier.shape)
            return logits[:, place, None] + shift, None

        return after


class SelectingTreeStep(_GrowingStep):
    """For a draft that chooses among the likeliest tokens of each place: the tree contains only these."""

    model: SelectingBlockDraft

    def _place_logits(self, drafted: torch.Tensor, rows: int) -> PlaceLogits:
        logits, gates = self.logits(drafted), self.model.gates(drafted).unflatten(0, (rows, -1))
        candidates, _ = top_children(logits, self.model.num_candidates, None)
        own = logits.gather(1, candidates).float().unflatten(0, (rows, -1))
        candidates = candidates.unflatten(0, (rows, -1))
        predecessors, successors = self.model.codebooks

        def after(place: int, frontier: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            # As in select_candidates; [rows, F, W, N] before the sum.
            context = predecessors[frontier].float() * gates[:, place, None].float()
            shift = (context[:, :, None] * successors[candidates[:, place]].float()[:, None]).sum(-1)
            return own[:, place, None] + shift, candidates[:, place]

        return after
