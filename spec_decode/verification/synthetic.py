"""Synthetic acceptance: a set mean accepted length, for benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_decode.sampling.parameters import Sampling
from spec_decode.sampling.target import draw, processed
from spec_decode.verification.base import VerifyOutput
from spec_decode.verification.kernels.synthetic_accept import synthetic_accept


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
        draft_positions: torch.Tensor,
    ) -> VerifyOutput:
        """See Verifier.verify. draft_logits are not read; the token behind the kept ones is plain decoding's."""
        accepted, positions = synthetic_accept(
            draft_tokens, seeds=sampling.seeds, draft_positions=draft_positions, mean=self.mean
        )
        behind = processed(target_logits, sampling, accepted)
        return VerifyOutput(accepted, draw(behind, sampling, positions))

    def draft_seeds(self, seeds: torch.Tensor, draft_positions: torch.Tensor) -> torch.Tensor:
        """The requests' own: no verdict looks at a token."""
        return seeds
