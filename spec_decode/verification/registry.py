"""Verifiers by name."""

from __future__ import annotations

import math

from builders.errors import require
from spec_decode.verification.base import Verifier
from spec_decode.verification.block_verification import BlockVerification
from spec_decode.verification.rejection_sampling import RejectionSampling
from spec_decode.verification.synthetic_acceptance import SyntheticAcceptance

_SYNTHETIC = "synthetic:"
_BY_NAME: dict[str, type[RejectionSampling] | type[BlockVerification]] = {
    "rejection": RejectionSampling,
    "block": BlockVerification,
}


def verifier(name: str = "rejection", *, num_speculative_tokens: int) -> Verifier:
    """The verifier called "rejection", "block" or "synthetic:MEAN", with a MEAN of 0 to num_speculative_tokens.

    Raises BatchError for another name or mean.
    """
    if name.startswith(_SYNTHETIC):
        return SyntheticAcceptance(_mean(name, num_speculative_tokens))
    known = ", ".join([*_BY_NAME, f"{_SYNTHETIC}MEAN"])
    require(
        name in _BY_NAME,
        f"a verifier must be one of {known}, got {name!r}; without one no draft can be verified. Choose a listed name.",
    )
    return _BY_NAME[name]()


def _mean(name: str, limit: int) -> float:
    try:
        mean = float(name.removeprefix(_SYNTHETIC))
    except ValueError:
        mean = math.nan
    require(
        0 <= mean <= limit,
        f"the mean of synthetic acceptance must be a number from 0 to {limit}, the speculative tokens of a round, got "
        f"{name!r}; no draft has that many to accept. Write it as {_SYNTHETIC}{limit / 2:g}, or draft more tokens.",
    )
    return mean
