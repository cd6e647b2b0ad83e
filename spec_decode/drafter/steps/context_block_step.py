"""The round of a draft that caches the target's states as context and drafts a block after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from builders import CaptureConstants, RequestTables
from spec_decode.drafter.plan import DraftPlan
from spec_decode.drafter.steps.step import Step
from spec_decode.model_api import ContextBlockDraft, InTurnBlockDraft, SelectingBlockDraft
from spec_decode.paged.attention import PagedAttention
from spec_decode.paged.step_buffers import StepBuffers
from spec_decode.sampling import DraftSampler
from spec_decode.sampling.candidate_sampler import CandidateSampler
from spec_decode.sampling.draft_sampler import NO_TOKEN, DraftSettings
from spec_decode.trees.kernels.top_children import top_children


class ContextBlockStep(Step[ContextBlockDraft, Any]):
    """Writes keys and values made from the verified tokens' states, then runs the block.

    The block has 1 + K tokens a row: the next token and K masks, each of which predicts the token in its own place. If
    the next token predicts too (first_place 0), each predicts the token after its place and K tokens are enough.

    context    StepBuffers of the verified tokens, 1 + K a row; the block overwrites the rejected ones
    """

    @property
    def step_0_len(self) -> int:
        """Block tokens per row."""
        return self.num_speculative_tokens + self.model.first_place

    @property
    def places(self) -> int:
        """The 1 + K verified tokens."""
        return 1 + self.num_speculative_tokens

    def _allocate(self, tables: RequestTables, plan: DraftPlan) -> DraftSettings:
        rows, device = tables.max_reqs, tables.device
        self.context = StepBuffers(self.groups, tables, self._step_0_plan, query_len=self.places)
        self._block_starts = torch.zeros(rows, dtype=torch.int32, device=device)
        self._token_ids = torch.full((rows, self.step_0_len), self.model.mask_token_id, device=device)
        return self._make_sampler()

    def _make_sampler(self) -> DraftSettings:
        return self._block_sampler()

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
        self.sampler.sample_block(self.logits(drafted), places.flatten())


class InTurnBlockStep(ContextBlockStep):
    """Draws the tokens of a block in sequence, each from logits that the token before it shifts."""

    model: InTurnBlockDraft
    sampler: DraftSampler

    def _make_sampler(self) -> DraftSampler:
        batch = self.step_0.batch
        # Separate lengths: a row that stops, stops for the sampler only.
        self._lens, self._positions = torch.zeros_like(batch.seq_lens), torch.zeros_like(batch.positions)
        self._confidence = self.model.confidence if self.config.min_confidence > 0 else None
        own = 0.0 if self._confidence else self.config.min_confidence
        return DraftSampler(self._lens, self._positions, batch.step, min_confidence=own, **self._drafted)

    def _sample(self, drafted: torch.Tensor, places: torch.Tensor) -> None:
        logits = self.logits(drafted).unflatten(0, places.shape)
        with self.products():
            self._sample_in_turn(logits, places)
            if self._confidence is not None:
                self._stop_where_unsure(self._confidence, drafted, len(places))

    def _sample_in_turn(self, logits: torch.Tensor, places: torch.Tensor) -> None:
        """Draw each column from logits [rows, K, V of the draft], given the tokens of the column before."""
        rows, step = len(logits), self.step_0.batch.step
        self._lens[:rows].copy_(self.step_0.batch.seq_lens[:rows])
        previous = self.inputs.next_tokens[:rows]
        for column in range(self.num_speculative_tokens):
            step.fill_(column)
            self._positions[:rows].copy_(places[:, column])
            self.sampler(logits[:, column] + self.model.bias_after(previous))
            previous = self.sampler.next_ids[:rows]

    def _stop_where_unsure(
        self, confidence_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], drafted: torch.Tensor, rows: int
    ) -> None:
        """Drop every token after one that the model's confidence puts below the limit; drafted [rows * K, H]."""
        tokens = self.sampler.draft_tokens[:rows]
        previous = torch.cat([self.inputs.next_tokens[:rows, None], tokens[:, :-1].clamp(min=0)], 1)
        confidence = confidence_of(drafted, previous.flatten())
        unsure = (confidence < self.config.min_confidence).view(rows, -1)[:, :-1].cumsum(1) > 0
        tokens[:, 1:].masked_fill_(unsure, NO_TOKEN)


class SelectingBlockStep(ContextBlockStep):
    """Draws the tokens of a block in sequence, each among the likeliest of its place."""

    model: SelectingBlockDraft
    sampler: CandidateSampler

    def _make_sampler(self) -> CandidateSampler:
        batch = self.step_0.batch
        return CandidateSampler(
            batch.seq_lens,
            batch.positions,
            batch.step,
            num_speculative_tokens=self.num_speculative_tokens,
            vocab_size=self.model.vocab_size,
            num_candidates=self.model.num_candidates,
            min_confidence=self.config.min_confidence,
        )

    def _sample(self, drafted: torch.Tensor, places: torch.Tensor) -> None:
        logits = self.logits(drafted)
        with self.products():
            gates = self.model.gates(drafted)
        candidates, _ = top_children(logits, self.model.num_candidates, None)
        next_tokens = self.inputs.next_tokens
        self.sampler.select_block(logits, candidates, gates, self.model.codebooks, next_tokens, places.flatten())
