"""The round of a block draft: K tokens from one forward over the accepted tokens and mask tokens."""

from __future__ import annotations

import torch

from builders import RequestTables
from spec_decode.drafter.kernels.block_inputs import block_inputs
from spec_decode.drafter.kernels.gather_accepted import GatherAccepted, gather_accepted
from spec_decode.drafter.plan import DraftPlan
from spec_decode.drafter.steps.step import Step
from spec_decode.drafter.tree_sampler import BlockTreeSampler
from spec_decode.model_api import BlockDraft
from spec_decode.sampling import DraftSampler


class BlockStep(Step[BlockDraft, DraftSampler | BlockTreeSampler]):
    """The only step of a block draft. A row has 2K places: up to 1 + K tokens, then a mask token for each draft token
    but the first; no token sees the remaining places.
    """

    def _allocate(self, tables: RequestTables, plan: DraftPlan) -> DraftSampler | BlockTreeSampler:
        dtype, hidden = self.groups[0].spec.dtype, self.model.mask_hidden
        zeros = torch.zeros(self.model.target_states_size, dtype=dtype, device=tables.device)
        self._mask_hidden = zeros if hidden is None else hidden
        return self._block_sampler()

    def run_step_0(self, size: int) -> None:
        """Draft K tokens for the first `size` rows.

        Raises BatchError if the draft model returns states of the wrong shape.
        """
        inputs, query_len = self.inputs, self.step_0.query_len
        token_ids, states = block_inputs(
            inputs.token_ids[:size],
            inputs.target_hidden_states[:size],
            inputs.next_tokens,
            inputs.accepted,
            self._mask_hidden,
            self.model.mask_token_id,
            query_len,
        )
        with self.products():
            states = self.model.combine(states)
        hidden = self.forward(size, token_ids, states)
        positions, columns = self.step_0.batch.positions, self.num_speculative_tokens
        drafted, places = hidden.new_empty(size * columns, hidden.shape[1]), positions.new_empty(size * columns)
        arguments = GatherAccepted(
            hidden=hidden,
            accepted=inputs.accepted,
            out=drafted,
            query_len=query_len,
            columns=columns,
            positions=positions,
            out_positions=places,
        )
        gather_accepted(*arguments)
        self.sampler.sample_block(self.logits(drafted), places)
