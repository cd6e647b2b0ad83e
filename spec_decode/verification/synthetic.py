"""Synthetic acceptance: a set mean accepted length, for benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_decode.ops.verify.keep_count import keep_count
from spec_decode.sampling import Sampling
from spec_decode.verification.base import Verdict
from spec_decode.verification.sampling import draw, processed


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
        accepted, positions = keep_count(
            draft_tokens, seeds=sampling.seeds, first_positions=first_positions, mean=self.mean
        )
        behind = processed(target_logits, sampling, accepted)
        return Verdict(accepted, draw(behind, sampling, positions))

    def draft_seeds(self, seeds: torch.Tensor, first_positions: torch.Tensor) -> torch.Tensor:
        """The requests' own: no verdict looks at a token."""
        return seeds
