"""Greedy matching and token-wise rejection sampling."""

from __future__ import annotations

from spec_decode.verification.base import LosslessVerifier
from spec_decode.verification.kernels.rejection_sample import rejection_sample


class RejectionSampling(LosslessVerifier):
    """Accepts the longest prefix of tokens that each pass on their own; leaves the target's distribution unchanged.

    Temperature 0 accepts a token that is the target's argmax. Otherwise token d is accepted with probability
    min(1, p(d) / q(d)), and the first rejected one is replaced by a draw from max(p - q, 0), normalised
    (Leviathan et al., 2023, appendix A.1).
    """

    _op = staticmethod(rejection_sample)
