"""The sampler of drafts that choose each token of a block among a few candidates, given the token before it."""

from __future__ import annotations

import torch

from builders.errors import require_tensor
from builders.kernels.rows import whole_rows
from spec_decode.sampling.draft_sampler import DraftSampler
from spec_decode.sampling.kernels.select_candidates import select_candidates


class CandidateSampler(DraftSampler):
    """A DraftSampler with draft_logits of -inf except at the W candidates of each row and column: a token is drawn from
    these only, and verified against the distribution that it was drawn from.

    scored int64 [R, K, W] holds the tokens whose logits the last round wrote, for the next one to reset.
    """

    def __init__(
        self,
        seq_lens: torch.Tensor,
        positions: torch.Tensor,
        step: torch.Tensor,
        *,
        num_speculative_tokens: int,
        vocab_size: int,
        num_candidates: int,
        min_confidence: float = 0.0,
    ) -> None:
        """See DraftSampler; num_candidates: W."""
        super().__init__(
            seq_lens,
            positions,
            step,
            num_speculative_tokens=num_speculative_tokens,
            vocab_size=vocab_size,
            min_confidence=min_confidence,
        )
        self.draft_logits.fill_(float("-inf"))
        shape = (len(seq_lens), num_speculative_tokens, num_candidates)
        self.scored = torch.zeros(shape, dtype=torch.int64, device=seq_lens.device)

    def select_block(
        self,
        logits: torch.Tensor,
        candidates: torch.Tensor,
        gates: torch.Tensor,
        codebooks: tuple[torch.Tensor, torch.Tensor],
        next_tokens: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Sample the K tokens of the first rows in sequence, in place, without reading `step`; device work only.

        - logits       [rows * K, V] any float: column k of row r at r * K + k
        - candidates   int64 [rows * K, W], the tokens that can be drawn in each column
        - gates        [rows * K, N] any float
        - codebooks    [V, N] of predecessors and of successors, contiguous: the sum of predecessors[the token before] *
                       gates * successors[the candidate] is added to a candidate's logit
        - next_tokens  int64 [>= rows], the token before column 0
        - positions    int64 [rows * K], of the draft input that each column predicts from

        Does not change seq_lens, next_ids or continue_flag. Raises BatchError, with nothing run, for tensors of the
        wrong shape, dtype or device.
        """
        width, device, lines = self.scored.shape[2], self.next_ids.device, len(logits)
        vocab = self.draft_logits.shape[2]
        require_tensor("logits", logits, shape=(lines, vocab), dtype=logits.dtype, device=device)
        require_tensor("candidates", candidates, shape=(lines, width), dtype=torch.int64, device=device)
        require_tensor("gates", gates, shape=(lines, None), dtype=gates.dtype, device=device)
        for name, codebook in zip(("predecessors", "successors"), codebooks, strict=True):
            require_tensor(name, codebook, shape=(vocab, gates.shape[1]), dtype=codebook.dtype, device=device)
        require_tensor("next_tokens", next_tokens, shape=(None,), dtype=torch.int64, device=device)
        require_tensor("positions", positions, shape=(lines,), dtype=torch.int64, device=device)
        temperature, seeds, _, seq_lens, _, drafted, draft_logits, _, lens, num_tokens, confidence, _, _ = self._buffers
        select_candidates(
            whole_rows(logits),
            candidates.contiguous(),
            whole_rows(gates),
            *codebooks,
            next_tokens.contiguous(),
            temperature,
            seeds,
            positions.contiguous(),
            seq_lens,
            drafted,
            draft_logits,
            self.scored,
            lens,
            num_tokens,
            confidence,
        )
