"""A step of the target over the running requests: it verifies their drafts and gives each its next token."""

from __future__ import annotations

import torch

from spec_decode.drafter import Drafter
from spec_decode.engine.input_batch import InputBatch
from spec_decode.engine.target_runner import TargetForward, TargetRunner
from spec_decode.sampling import sample_target
from spec_decode.verification import Verifier, VerifyOutput


class TargetStep:
    """Reads and writes an InputBatch and the drafter's inputs, on the device alone; eager, or in a graph per size."""

    def __init__(self, runner: TargetRunner, batch: InputBatch, drafter: Drafter | None, verifier: Verifier) -> None:
        self._runner = runner
        self._batch = batch
        self._drafter = drafter
        self._verifier = verifier

    def capture(self, *, progress: bool = False) -> None:
        """Capture the step at every size, on padding rows; no request may be live in the tables."""
        self._runner.capture(self._step, progress=progress)

    @torch.no_grad()
    def run(self) -> None:
        """Enqueue the step over the live rows of the tables. Waits for nothing, unless a group's builder must know the
        exact lengths."""
        size = self._runner.padded_size()
        if self._runner.builds_before_replay:
            self._runner.build(size, self._batch.prepare_inputs(size)[0])
        self._runner.run(self._step, size)

    def _step(self, size: int, forward: TargetForward) -> None:
        """What the graph of `size` rows holds."""
        rows = slice(size)
        context_lens, token_ids = self._batch.prepare_inputs(size)
        logits, target_hidden_states = forward(context_lens, token_ids)
        output = self._verify(rows, logits)
        self._batch.update_requests(rows, token_ids, output)
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
