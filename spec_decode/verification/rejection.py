"""Greedy matching and token-wise rejection sampling."""

from __future__ import annotations

import torch

from spec_decode.sampling.parameters import Sampling
from spec_decode.sampling.target import processed
from spec_decode.verification.base import VerifyOutput
from spec_decode.verification.kernels.draft_round import DraftRound
from spec_decode.verification.kernels.rejection_sample import rejection_sample


class RejectionSampling:
    """Keeps the longest prefix whose every token the target agrees to; leaves the target's distribution unchanged.

    Temperature 0 keeps a token that is the target's argmax. Otherwise token d is kept with probability
    min(1, p(d) / q(d)), and the first refused one is replaced by a draw from max(p - q, 0), normalised
    (Leviathan et al., 2023, appendix A.1).
    """

    def verify(
        self,
        target_logits: torch.Tensor,
        draft_tokens: torch.Tensor,
        draft_logits: torch.Tensor,
        *,
        sampling: Sampling,
        draft_positions: torch.Tensor,
    ) -> VerifyOutput:
        """See Verifier.verify."""
        round_ = DraftRound(
            processed=processed(target_logits, sampling),
            draft_tokens=draft_tokens,
            draft_logits=draft_logits,
            temperature=sampling.temperature,
            seeds=sampling.seeds,
            coin_seeds=sampling.seeds,
            draft_positions=draft_positions,
        )
        return VerifyOutput(*rejection_sample(round_))

    def draft_seeds(self, seeds: torch.Tensor, draft_positions: torch.Tensor) -> torch.Tensor:
        """The requests' own: no verdict has looked at a token behind the refused one, so its noise is still fresh."""
        return seeds
