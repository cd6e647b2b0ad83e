"""Synthetic acceptance: a set mean accepted length, for benchmarks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from spec_decode.ops import noise
from spec_decode.sampling import Sampling
from spec_decode.verification.base import Verdict
from spec_decode.verification.sampling import leading, sample_target


@dataclass(frozen=True, slots=True)
class SyntheticAcceptance:
    """Keeps `mean` draft tokens in the mean over requests and rounds, whatever they are: the text is not the target's.

    A row keeps floor(mean) tokens, and one more with probability mean - floor(mean): the simplest law with this mean
    (exact but for the coin's grain of 2**-23), and the one of least spread. It keeps no more than was proposed, so
    drafts that end early lower the mean. Requests of one seed at one position keep the same number: give them seeds of
    their own.
    """

    mean: float

    def verify(
        self,
        target_logits: torch.Tensor,
        draft_tokens: torch.Tensor,
        draft_logits: torch.Tensor,
        *,
        sampling: Sampling,
        first_positions: torch.Tensor,
    ) -> Verdict:
        """See Verifier.verify. draft_logits are not read; the token behind the kept ones is plain decoding's."""
        keys = noise.key(sampling.seeds, first_positions, noise.ACCEPT)
        whole = math.floor(self.mean)
        # A comparison, not floor(mean + coin): the sum of the two rounds in fp32 and would shift the mean.
        count = whole + (noise.uniform(keys, torch.zeros_like(keys)) < self.mean - whole).long()
        accepted = torch.minimum(count, leading(draft_tokens >= 0))
        row = torch.arange(len(accepted), device=accepted.device)
        behind = target_logits[row, accepted]
        return Verdict(accepted, sample_target(behind, sampling=sampling, positions=first_positions + accepted))

    def draft_seeds(self, seeds: torch.Tensor, first_positions: torch.Tensor) -> torch.Tensor:
        """The requests' own: no verdict looks at a token."""
        return seeds
