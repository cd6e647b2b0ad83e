"""A step of the target over the running requests: it verifies their drafts and gives each its next token."""

from __future__ import annotations

import torch

from spec_decode.drafter import Drafter
from spec_decode.engine.input_batch import InputBatch
from spec_decode.engine.target_runner import TargetForward
from spec_decode.sampling import sample_target
from spec_decode.verification import Verifier, VerifyOutput


class TargetStep:
    """A `Step` of the target runner: reads and writes an InputBatch and the drafter's inputs, on the device alone."""

    def __init__(self, batch: InputBatch, drafter: Drafter | None, verifier: Verifier) -> None:
        self._batch = batch
        self._drafter = drafter
        self._verifier = verifier

    def __call__(self, size: int, forward: TargetForward) -> None:
        """What the graph of `size` rows holds."""
        rows = slice(size)
        context_lens, token_ids = self._batch.prepare_inputs(size)
        logits, target_hidden_states = forward(context_lens, token_ids)
        output = self._verify(rows, logits)
        self._batch.update_requests(rows, token_ids, self._batch.drafts(rows), output)
        self._batch.set_draft_inputs(rows, target_hidden_states)

    def _verify(self, rows: slice, logits: torch.Tensor) -> VerifyOutput:
        """logits: [size, 1 + K, V]."""
        positions, sampling = self._batch.lens[rows], self._batch.sampling.head(rows.stop)
        if self._drafter is None:
            next_tokens = sample_target(logits[:, 0], sampling=sampling, positions=positions)
            return VerifyOutput(torch.zeros_like(next_tokens), next_tokens)
        drafts = self._drafter.drafts
        return self._verifier.verify(
            logits, drafts.tokens[rows], drafts.logits[rows], sampling=sampling, draft_positions=positions
        )
