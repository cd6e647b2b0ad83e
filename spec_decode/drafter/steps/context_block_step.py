"""The round of a draft that caches the target's states as context and drafts a block after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from builders import CaptureConstants, RequestTables
from spec_decode.drafter.plan import DraftPlan
from spec_decode.drafter.steps.logits_after import PlaceLogits, logits_after
from spec_decode.drafter.steps.step import Step
from spec_decode.model_api import CandidateTable, ContextBlockDraft, TokenBias
from spec_decode.model_api.place_logits import Confidence
from spec_decode.paged.attention import PagedAttention
from spec_decode.paged.step_metadata import StepBuffers
from spec_decode.sampling import DraftSampler
from spec_decode.sampling.draft_sampler import NO_TOKEN, DraftSettings
from spec_decode.trees.kernels.top_children import top_children

Take: TypeAlias = Callable[..., torch.Tensor]
"""Takes a place, its logits and choices; returns the tokens taken there, int64 [rows, F]."""


class ContextBlockStep(Step[ContextBlockDraft, Any]):
    """Writes keys and values made from the verified tokens' states, then runs the block.

    The block has 1 + K tokens a row: the next token and K masks, each of which predicts the token in its own place. If
    the next token predicts too (first_place 0), each predicts the token after its place and K tokens are enough.

    context    StepBuffers of the verified tokens, 1 + K a row; the block overwrites the rejected ones
    """

    def _allocate(self, tables: RequestTables, plan: DraftPlan) -> DraftSettings:
        rows, device = tables.max_reqs, tables.device
        self._rule = self.model.place_logits
        self.context = StepBuffers(self.groups, tables, self._step_0_plan, query_len=self.shape.places)
        self._block_starts = torch.zeros(rows, dtype=torch.int32, device=device)
        self._token_ids = torch.full((rows, self.shape.step_0_len), self.model.mask_token_id, device=device)
        return self._make_sampler()

    def _make_sampler(self) -> DraftSettings:
        batch, rule = self.step_0.batch, self._rule
        if rule is None:
            return self._block_sampler()
        if self.config.tree is not None:
            return self._tree_sampler(batch)
        if isinstance(rule, CandidateTable):
            return self._draft_sampler(batch, num_candidates=rule.num_candidates)
        # Separate lengths: a row that stops, stops for the sampler only.
        self._lens, self._positions = torch.zeros_like(batch.seq_lens), torch.zeros_like(batch.positions)
        own = 0.0 if rule.confidence else self.config.min_confidence
        return DraftSampler(self._lens, self._positions, batch.step, min_confidence=own, **self._drafted)

    def write_prompt(
        self, token_ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attention: PagedAttention
    ) -> None:
        """Write the context KV of T tokens, from states [T, H] only; positions int64 [T]."""
        self.model.write_context(states, positions, attention)

    def _place(self, size: int) -> Sequence[tuple[StepBuffers, torch.Tensor]]:
        """See Step: the verified tokens, and the block after the accepted ones."""
        kept = self.inputs.accepted[:size].clamp(0, self.num_speculative_tokens)
        torch.add(self.inputs.context_lens[:size], kept + 1, out=self._block_starts[:size])
        return [(self.context, self.inputs.context_lens), (self.step_0, self._block_starts)]

    def _prepare_capture(self, size: int) -> CaptureConstants:
        self.context.prepare_capture(size)
        return self.step_0.prepare_capture(size)

    def run_step_0(self, size: int) -> None:
        """Draft K tokens for the first `size` rows.

        Raises BatchError if the draft model returns states of the wrong shape.
        """
        inputs, query_len, model = self.inputs, self.step_0.query_len, self.model
        self._token_ids[:size, 0].copy_(inputs.next_tokens[:size])
        with self.products():
            states = model.combine(inputs.target_hidden_states[:size].flatten(0, 1))
            positions = self.context.batch.positions[: size * self.context.query_len]
            model.write_context(states, positions, self.context.attention)
        hidden = self.forward(size, self._token_ids[:size], states)
        first = model.first_place
        drafted = hidden.unflatten(0, (size, query_len))[:, first:].flatten(0, 1)
        # The input of an ordinary step predicts the second token after its place; here the first, or the one in it.
        positions = self.step_0.batch.positions[: size * query_len]
        self._sample(drafted, positions.view(size, query_len)[:, first:] - 1 - first)

    def _sample(self, drafted: torch.Tensor, places: torch.Tensor) -> None:
        """Draw K tokens a row from states [rows * K, H]; places int64 [rows, K]: ordinary inputs that predict them."""
        logits, rule = self.logits(drafted), self._rule
        if rule is None:
            self.sampler.sample_block(logits, places.flatten())
            return
        with self.products():
            if self.config.tree is not None:
                self._grow_trees(rule, logits, drafted, len(places))
            elif isinstance(rule, CandidateTable):
                self._select(rule, logits, drafted, places)
            else:
                self._draw_in_order(rule, logits, drafted, places)

    def _select(self, table: CandidateTable, logits: torch.Tensor, drafted: torch.Tensor, places: torch.Tensor) -> None:
        """Draw all places among their candidates, in one kernel."""
        candidates, _ = top_children(logits, table.num_candidates, None)
        gates, codebooks = table.gates(drafted), (table.predecessors, table.successors)
        next_tokens = self.inputs.next_tokens
        self.sampler.select_block(logits, candidates, gates, codebooks, next_tokens, places.flatten())

    def _draw_in_order(
        self, bias: TokenBias, logits: torch.Tensor, drafted: torch.Tensor, places: torch.Tensor
    ) -> None:
        """Draw a token per row at each place."""
        rows = len(places)
        self._lens[:rows].copy_(self.step_0.batch.seq_lens[:rows])

        def draw(place: int, logits: torch.Tensor, _: None) -> torch.Tensor:
            self._positions[:rows].copy_(places[:, place])
            self.sampler(logits[:, 0])
            next_ids: torch.Tensor = self.sampler.next_ids[:rows, None]
            return next_ids

        self._in_order(logits_after(bias, logits, drafted, rows), rows, draw)
        if bias.confidence is not None and self.config.min_confidence > 0:
            self._stop_where_unsure(bias.confidence, drafted, rows)

    def _grow_trees(
        self, rule: TokenBias | CandidateTable, logits: torch.Tensor, drafted: torch.Tensor, rows: int
    ) -> None:
        """Grow a level of each tree at each place: every path has its own logits."""
        tree, temperature = self.sampler.tree, self.sampler.temperature[:rows]

        def grow(place: int, logits: torch.Tensor, choices: torch.Tensor | None) -> torch.Tensor:
            tree.grow(logits, choices, temperature)
            frontier: torch.Tensor = tree.frontier_tokens[:rows]
            return frontier

        self._in_order(logits_after(rule, logits, drafted, rows), rows, grow)
        self.sampler.keep(self.step_0.batch.seq_lens[:rows])

    def _in_order(self, after: PlaceLogits, rows: int, take: Take) -> None:
        """Take a level of tokens at each place, from logits that the tokens of the place before have changed."""
        previous = self.inputs.next_tokens[:rows, None]
        for place in range(self.num_speculative_tokens):
            self.step_0.batch.step.fill_(place)
            previous = take(place, *after(place, previous))

    def _stop_where_unsure(self, confidence_of: Confidence, drafted: torch.Tensor, rows: int) -> None:
        """Drop every token after one that the model's confidence puts below the limit; drafted [rows * K, H]."""
        tokens = self.sampler.draft_tokens[:rows]
        previous = torch.cat([self.inputs.next_tokens[:rows, None], tokens[:, :-1].clamp(min=0)], 1)
        confidence = confidence_of(drafted, previous.flatten())
        unsure = (confidence < self.config.min_confidence).view(rows, -1)[:, :-1].cumsum(1) > 0
        tokens[:, 1:].masked_fill_(unsure, NO_TOKEN)
