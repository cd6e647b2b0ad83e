"""The device work of a round of a draft that keeps the target's states as context, and drafts a block after them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from builders import CaptureConstants, RequestTables
from spec_decode.drafter.steps.extend_step import ExtendStep, make_sampler
from spec_decode.models import DraftModel
from spec_decode.paged.attention import PagedAttention
from spec_decode.paged.kv_groups import KVGroup
from spec_decode.paged.metadata_plan import MetadataPlan
from spec_decode.paged.step_buffers import StepBuffers
from spec_decode.sampling import DraftSampler
from spec_decode.sampling.draft_sampler import NO_TOKEN


class ContextBlockStep(ExtendStep[DraftSampler]):
    """Keys and values of the verified tokens' states are stored, then the block runs: the next token, and a mask for
    each draft token, which predicts the token in its own place. Where the next token predicts too, each predicts the
    one after its place, and there is a mask less: the block has 1 + K tokens a row, or K.

    context    StepBuffers of the verified tokens, 1 + K a row; those that were rejected lie where the block will
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
        self._first = 0 if model.predicts_from_next_token else 1
        query_len = num_speculative_tokens + self._first
        self.context = StepBuffers(groups, tables, extend_plan, query_len=self.places(num_speculative_tokens))
        extend = StepBuffers(groups, tables, extend_plan, query_len=query_len)
        batch = extend.batch
        # Of tokens that are sampled in turn: a row that stops does so for the sampler alone.
        self._lens, self._positions = torch.zeros_like(batch.seq_lens), torch.zeros_like(batch.positions)
        self._min_confidence = min_confidence
        self._judged = model.judges_itself and min_confidence > 0
        super().__init__(
            model,
            groups,
            num_speculative_tokens=num_speculative_tokens,
            extend=extend,
            sampler=make_sampler(
                model, self._lens if model.in_turn else batch.seq_lens, self._positions, batch.step,
                num_speculative_tokens=num_speculative_tokens,
                min_confidence=0.0 if self._judged else min_confidence,
            ),
        )  # fmt: skip
        self._block_starts = torch.zeros(tables.max_reqs, dtype=torch.int32, device=tables.device)
        assert model.mask_token_id is not None
        self._token_ids = torch.full((tables.max_reqs, query_len), model.mask_token_id, device=tables.device)

    def write_prompt(
        self, token_ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attention: PagedAttention
    ) -> None:
        """Write what the layers attend to of T tokens, of their states [T, H] alone; positions int64 [T]."""
        self.model.write_context(states, positions, attention)

    def begin(self, size: int) -> None:
        """Set the state of the step for the first `size` rows, and build what the host builds of it."""
        self._place_block(size)
        self.context.begin(self.inputs.context_lens, size)
        self.extend.begin(self._block_starts, size)

    def begin_in_graph(self, size: int) -> None:
        """What a graph holds of it."""
        self._place_block(size)
        self.context.begin_in_graph(self.inputs.context_lens, size)
        self.extend.begin_in_graph(self._block_starts, size)

    def prepare_capture(self, size: int) -> CaptureConstants:
        """The host constants that a capture of `size` rows bakes in."""
        self.context.prepare_capture(size)
        return self.extend.prepare_capture(size)

    def _place_block(self, size: int) -> None:
        kept = self.inputs.accepted[:size].clamp(0, self.num_speculative_tokens)
        torch.add(self.inputs.context_lens[:size], kept + 1, out=self._block_starts[:size])

    def run_extend(self, size: int) -> None:
        """Draft K tokens for the first `size` rows.

        Raises BatchError for a draft model that returns states of another shape.
        """
        inputs, query_len, model = self.inputs, self.extend.query_len, self.model
        self._token_ids[:size, 0].copy_(inputs.next_tokens[:size])
        with self.products():
            states = model.combine(inputs.target_hidden_states[:size].flatten(0, 1))
            positions = self.context.batch.positions[: size * self.context.query_len]
            model.write_context(states, positions, self.context.attention)
        hidden = self.forward(size, self._token_ids[:size].flatten(), states)
        drafted = hidden.unflatten(0, (size, query_len))[:, self._first :].flatten(0, 1)
        # A step's input predicts the second token after its place; here it is the first, or the one in it.
        positions = self.extend.batch.positions[: size * query_len]
        places = positions.view(size, query_len)[:, self._first :] - 1 - self._first
        logits = self.logits(drafted).unflatten(0, (size, self.num_speculative_tokens))
        if not model.in_turn:
            self.sampler.sample_block(logits.flatten(0, 1), places.flatten())
            return
        with self.products():
            self._sample_in_turn(logits, places)
            if self._judged:
                self._stop_where_unsure(drafted, size)

    def _sample_in_turn(self, logits: torch.Tensor, places: torch.Tensor) -> None:
        """Each column's tokens from logits [rows, K, V of the draft], by those of the column before."""
        rows, step = len(logits), self.extend.batch.step
        self._lens[:rows].copy_(self.extend.batch.seq_lens[:rows])
        previous = self.inputs.next_tokens[:rows]
        for column in range(self.num_speculative_tokens):
            step.fill_(column)
            self._positions[:rows].copy_(places[:, column])
            self.sampler(logits[:, column] + self.model.bias_after(previous))
            previous = self.sampler.next_ids[:rows]

    def _stop_where_unsure(self, drafted: torch.Tensor, rows: int) -> None:
        """Let no token stand behind one that the model itself takes for improbable; drafted [rows * K, H]."""
        tokens = self.sampler.draft_tokens[:rows]
        previous = torch.cat([self.inputs.next_tokens[:rows, None], tokens[:, :-1].clamp(min=0)], 1)
        confidence = self.model.confidence(drafted, previous.flatten())
        unsure = (confidence < self._min_confidence).view(rows, -1)[:, :-1].cumsum(1) > 0
        tokens[:, 1:].masked_fill_(unsure, NO_TOKEN)
