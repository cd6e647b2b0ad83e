"""Step 0 and the later steps of a draft model, over buffers that never move: the same kernels eager or captured."""

from __future__ import annotations

import torch

from builders import RequestTables, advance_state, set_decode_state
from spec_decode.drafter.plan import DraftPlan
from spec_decode.drafter.steps.step import Step
from spec_decode.drafter.strategies.base import LaterSteps
from spec_decode.model_api import Attention, DraftInputs, DraftModel
from spec_decode.paged.step_metadata import StepBuffers
from spec_decode.sampling import DraftSampler


class DraftStep(Step[DraftModel, DraftSampler]):
    """A draft model's step 0, with 1 + K tokens a row, and its later steps, with one token a row.

    decode   StepBuffers of a later step
    hidden   [R, hidden_size], the states that the next later step starts from
    """

    @property
    def later(self) -> LaterSteps:
        """The steps of one token a row."""
        return self

    def _allocate(self, tables: RequestTables, plan: DraftPlan) -> DraftSampler:
        self.decode = StepBuffers(self.groups, tables, plan, query_len=1, horizon=self.num_speculative_tokens - 1)
        dtype = self.groups[0].spec.dtype
        self.hidden = torch.zeros(tables.max_reqs, self.model.hidden_size, dtype=dtype, device=tables.device)
        return self._draft_sampler(self.decode.batch)

    def run_step_0(self, size: int) -> None:
        """Run step 0 over the target's tokens shifted by one, with the next token after the last accepted.

        Raises BatchError if the draft model returns states of the wrong shape.
        """
        hidden = self.forward_last(size)
        step_0 = self.step_0
        set_decode_state(self.decode.batch, step_0.batch.seq_lens, self.inputs.accepted, size, step_0.query_len)
        self.sampler(self.logits(hidden), hidden, self.hidden)

    def advance_state(self, size: int) -> None:
        """Advance the state of the first `size` rows to the next later step."""
        advance_state(self.decode.batch, size)

    def run_later_step(self, size: int, hidden: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Run a later step from the previous hidden states [size, hidden_size]; return the new ones, same shape."""
        hidden = self._forward_later(size, hidden, attention)
        self.sampler(self.logits(hidden))
        return hidden

    def run_later_step_in_place(self, size: int, attention: Attention) -> None:
        """Run a later step that reads and overwrites `hidden`."""
        hidden = self._forward_later(size, self.hidden[:size], attention)
        self.sampler(self.logits(hidden), hidden, self.hidden)

    def _forward_later(self, size: int, hidden: torch.Tensor, attention: Attention) -> torch.Tensor:
        positions = self.decode.batch.positions[:size]
        with self.products():
            return self.model.forward(DraftInputs(self.sampler.next_ids[:size], hidden, positions, attention))
