"""Greedy matching and token-wise rejection sampling."""

from __future__ import annotations

import torch

from spec_decode.ops import noise
from spec_decode.sampling import Sampling
from spec_decode.verification.base import Verdict
from spec_decode.verification.sampling import Round, leading


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
        first_positions: torch.Tensor,
    ) -> Verdict:
        """See Verifier.verify."""
        round_ = Round.of(target_logits, draft_tokens, draft_logits, sampling=sampling, first_positions=first_positions)
        keys = noise.key(sampling.seeds[:, None], round_.positions, noise.ACCEPT)
        coin = noise.uniform(keys, torch.zeros_like(keys))
        # Strictly less: a product that underflows to 0 must not keep a token that the target cannot produce.
        agreed = torch.where(round_.hot[:, None], coin * round_.q_token < round_.p_token, round_.greedy)
        accepted = leading(agreed & round_.proposed)
        return Verdict(accepted, round_.next_tokens(accepted))

    def draft_seeds(self, seeds: torch.Tensor, first_positions: torch.Tensor) -> torch.Tensor:
        """The requests' own: no verdict has looked at a token behind the refused one, so its noise is still fresh."""
        return seeds
