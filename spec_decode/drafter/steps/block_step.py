"""The device work of a round whose K tokens are drafted at once, in one forward over accepted tokens and masks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from builders import RequestTables
from spec_decode.drafter.kernels.block_inputs import block_inputs
from spec_decode.drafter.kernels.gather_block import gather_block
from spec_decode.drafter.steps.extend_step import ExtendStep, make_sampler
from spec_decode.models import DraftModel
from spec_decode.paged.kv_groups import KVGroup
from spec_decode.paged.metadata_plan import MetadataPlan
from spec_decode.paged.step_buffers import StepBuffers
from spec_decode.sampling import DraftSampler


class BlockStep(ExtendStep[DraftSampler]):
    """A block draft's only step. A row has 2K places: up to 1 + K tokens, a mask for each draft token but the first,
    and what is left, which no token sees.
    """

    def __init__(
        self,
        model: DraftModel,
        groups: Sequence[KVGroup],
        tables: RequestTables,
        *,
        num_speculative_tokens: int,
        min_confidence: float,
        extend_plan: MetadataPlan,
    ) -> None:
        extend = StepBuffers(groups, tables, extend_plan, query_len=self.places(num_speculative_tokens))
        batch = extend.batch
        super().__init__(
            model,
            groups,
            num_speculative_tokens=num_speculative_tokens,
            extend=extend,
            sampler=make_sampler(
                model, batch.seq_lens, batch.positions, batch.step,
                num_speculative_tokens=num_speculative_tokens, min_confidence=min_confidence,
            ),
        )  # fmt: skip
        assert model.mask_token_id is not None
        self._mask_token_id = model.mask_token_id
        self._mask_hidden = model.mask_hidden
        if self._mask_hidden is None:
            dtype = groups[0].spec.dtype
            self._mask_hidden = torch.zeros(model.target_states_size, dtype=dtype, device=tables.device)

    @staticmethod
    def places(num_speculative_tokens: int) -> int:
        """Tokens of a row: 2K."""
        return 2 * num_speculative_tokens

    def run_extend(self, size: int) -> None:
        """Draft K tokens for the first `size` rows.

        Raises BatchError for a draft model that returns states of another shape.
        """
        inputs, query_len = self.inputs, self.extend.query_len
        token_ids, states = block_inputs(
            inputs.token_ids[:size], inputs.target_hidden_states[:size], inputs.next_tokens, inputs.accepted,
            self._mask_hidden, self._mask_token_id, query_len,
        )  # fmt: skip
        with self.products():
            states = self.model.combine(states)
        hidden = self.forward(size, token_ids, states)
        positions = self.extend.batch.positions[: size * query_len]
        drafted, positions = gather_block(hidden, positions, inputs.accepted, query_len, self.num_speculative_tokens)
        self.sampler.sample_block(self.logits(drafted), positions)
