"""A target step over the running requests: verifies their drafts and gives each its next token."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from spec_decode.drafter import Drafter
from spec_decode.engine.input_batch import InputBatch
from spec_decode.engine.target_runner import TargetForward, TargetRunner
from spec_decode.sampling.target_sampler import sample_target
from spec_decode.trees import TreeBatch
from spec_decode.verification import TreeSampling, Verifier, VerifyOutput


class TargetStep:
    """A `Step` of the target runner: reads and writes an InputBatch and the drafter's inputs, on the device only."""

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
        self._batch.set_logprobs(rows, logits)
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


class TreeTargetStep:
    """A `Step` of the target runner for trees. The accepted path continues as a chain: its KV is compacted, and the
    requests and the drafter see only its tokens and states."""

    def __init__(self, batch: InputBatch, drafter: Drafter, target: TargetRunner) -> None:
        self._batch = batch
        self._drafter = drafter
        self._target = target
        trees = drafter.drafts.parents
        assert trees is not None
        # A tree of fewer tokens than the draft has steps is at most that deep.
        self._steps = drafter.num_speculative_tokens
        self._verifier = TreeSampling(min(self._steps, trees.shape[1]))

    def __call__(self, size: int, forward: TargetForward) -> None:
        """What the graph of `size` rows holds."""
        rows, batch, drafts = slice(size), self._batch, self._drafter.drafts
        assert drafts.parents is not None
        trees = TreeBatch(drafts.tokens[rows], drafts.parents[rows])
        context_lens, token_ids = batch.prepare_inputs(size)
        logits, target_hidden_states = forward(context_lens, token_ids, trees.parents)
        found = self._verifier.verify(
            logits, trees, sampling=batch.sampling.head(size), draft_positions=batch.lens[rows]
        )
        self._target.move_accepted(found.path)
        # The root and the path; after a path's end the root again, which nothing reads.
        path = F.pad(found.path, (0, self._steps - found.path.shape[1]), value=-1)
        kept = F.pad(path.clamp(min=0), (1, 0))
        chain = token_ids.gather(1, kept)
        drafted = chain[:, 1:].where(path >= 0, -1)
        batch.update_requests(rows, chain, drafted, VerifyOutput(found.accepted, found.next_tokens))
        if batch.logprobs is not None:
            batch.set_logprobs(rows, _rows_at(logits, kept))
        batch.set_draft_inputs(rows, _rows_at(target_hidden_states, kept))


def _rows_at(of_tree: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Select query tokens of trees: [n, 1 + N, X] -> [n, 1 + K, X], by indices `kept`, int64 [n, 1 + K]."""
    return of_tree.gather(1, kept[..., None].expand(-1, -1, of_tree.shape[2]))
