"""The round of a draft that grows a tree per request: step 0, and later steps over everything drafted so far."""

from __future__ import annotations

import torch

from builders import RequestTables, set_extend_state
from spec_decode.drafter.kernels.gather_accepted import GatherAccepted, gather_accepted
from spec_decode.drafter.plan import DraftPlan
from spec_decode.drafter.steps.step import Step
from spec_decode.drafter.strategies.base import LaterSteps
from spec_decode.drafter.tree_sampler import TreeSampler
from spec_decode.model_api import Attention, DraftInputs, DraftModel
from spec_decode.paged.step_metadata import StepBuffers
from spec_decode.trees import Tree
from spec_decode.trees.kernels.place_frontier import PlaceFrontier, place_frontier


class TreeStep(Step[DraftModel, TreeSampler]):
    """Step 0, with 1 + K tokens a row, and later steps, with the W tokens of each of K - 1 frontiers.

    A later step also runs over the earlier frontiers, since tokens of a tree see each other as queries of one batch;
    so few extra queries cost next to nothing while the step is bound by weight reads. Tokens not drafted yet are
    masked. All later steps therefore have one shape, and their metadata does not change.

    decode   StepBuffers of a later step; never run for K = 1
    hidden   [R, H], the state that the root's children are drafted from
    """

    @property
    def later(self) -> LaterSteps:
        """The steps over all frontiers."""
        return self

    @property
    def _tree(self) -> Tree:
        assert self.config.tree is not None
        return self.config.tree

    def _allocate(self, tables: RequestTables, plan: DraftPlan) -> TreeSampler:
        tree, model, later = self._tree, self.model, self.num_speculative_tokens - 1
        dtype, rows, device = self.groups[0].spec.dtype, tables.max_reqs, tables.device
        query_len = max(1, tree.width * later)
        self.decode = StepBuffers(self.groups, tables, plan, query_len=query_len, horizon=later, trees=True)
        self.hidden = torch.zeros(rows, model.hidden_size, dtype=dtype, device=device)
        self._states = torch.zeros(rows, query_len, model.hidden_size, dtype=dtype, device=device)
        self._token_ids = torch.zeros(rows, query_len, dtype=torch.int64, device=device)
        self._starts = torch.zeros(rows, dtype=torch.int32, device=device)
        self._frontier = torch.arange(tree.width, device=device)
        return self._tree_sampler(self.decode.batch)

    def run_step_0(self, size: int) -> None:
        """Run step 0 as DraftStep does, and draft the root's children.

        Raises BatchError if the draft model returns states of the wrong shape.
        """
        inputs, last, batch = self.inputs, self.hidden[:size], self.decode.batch
        hidden = self.forward(size, *self.shifted(size))
        gather_accepted(*GatherAccepted(hidden, inputs.accepted, out=last, query_len=self.step_0.query_len))
        kept = inputs.accepted[:size].clamp(0, self.num_speculative_tokens)
        torch.add(inputs.context_lens[:size], kept + 1, out=self._starts[:size])
        if self.num_speculative_tokens > 1:
            set_extend_state(batch, self._starts, size, self.decode.query_len)
        batch.step.zero_()
        self._grow(last[:, None], self.logits(last)[:, None])

    def advance_state(self, size: int) -> None:
        """Advance to the next later step: only the step number changes."""
        self.decode.batch.step.add_(1)

    def run_later_step(self, size: int, hidden: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Run a later step from the buffers; hidden is not read and is returned as is."""
        self.run_later_step_in_place(size, attention)
        return hidden

    def run_later_step_in_place(self, size: int, attention: Attention) -> None:
        """Run a later step from the frontier that the previous one left."""
        token_ids, states = self._token_ids[:size].flatten(), self._states[:size].flatten(0, 1)
        positions = self.decode.batch.positions[: len(token_ids)]
        with self.products():
            hidden = self.model.forward(DraftInputs(token_ids, states, positions, attention))
        hidden = hidden.view(size, self.decode.query_len, -1)
        # Capture and warm-up run before any step 0, with step still 0.
        before = (self.decode.batch.step - 1).clamp(0, self.num_speculative_tokens - 2)
        frontier = before * len(self._frontier) + self._frontier
        logits = self.logits(hidden.index_select(1, frontier).flatten(0, 1))
        self._grow(hidden, logits.unflatten(0, (size, -1)))

    def _grow(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Grow the trees by logits [rows, F, V], and place the next frontier; hidden [rows, 1 or Q, H]."""
        size, batch, tree = len(logits), self.decode.batch, self.sampler.tree
        self.sampler(logits, self.step_0.batch.seq_lens[:size])
        if self.num_speculative_tokens > 1:
            count = size * self.decode.query_len
            arguments = PlaceFrontier(
                step=batch.step,
                tokens=tree.frontier_tokens[:size],
                places=tree.frontier_places[:size],
                hidden=hidden,
                seq_lens=batch.seq_lens,
                token_ids=self._token_ids[:size],
                states=self._states[:size],
                positions=batch.positions[:count].view(size, -1),
                tree_masks=batch.tree_masks[:count].view(size, -1),
            )
            place_frontier(*arguments)
