"""The device work of a round whose tokens are chosen in turn among the candidates of each place of a block."""

from __future__ import annotations

import torch

from builders import BatchBuffers
from spec_decode.drafter.steps.context_block_step import ContextBlockStep
from spec_decode.models import SelectingBlockDraft
from spec_decode.sampling import CandidateSampler
from spec_decode.trees.kernels.top_children import top_children


class SelectingBlockStep(ContextBlockStep):
    """A block whose tokens are drawn one after the other, each among the likeliest of its place."""

    model: SelectingBlockDraft
    sampler: CandidateSampler

    def _make_sampler(self, batch: BatchBuffers) -> CandidateSampler:
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
