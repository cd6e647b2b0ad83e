"""Greedy matching and token-wise rejection sampling."""

from __future__ import annotations

import torch

from spec_decode.verification.kernels.rejection_sample import rejection_sample
from spec_decode.verification.lossless import LosslessVerifier


class RejectionSampling(LosslessVerifier):
    """Accepts the longest prefix of tokens that each pass on their own; leaves the target's distribution unchanged.

    Temperature 0 accepts a token that is the target's argmax. Otherwise token d is accepted with probability
    min(1, p(d) / q(d)), and the first rejected one is replaced by a draw from max(p - q, 0), normalised
    (Leviathan et al., 2023, appendix A.1).
    """

    _op = staticmethod(rejection_sample)

    def draft_seeds(self, seeds: torch.Tensor, draft_positions: torch.Tensor) -> torch.Tensor:
        """The requests' own: nothing after the rejected token was looked at, so its noise is still unused."""
        return seeds
