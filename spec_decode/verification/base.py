"""The contract of a verifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from spec_decode.sampling.parameters import Sampling


@dataclass(frozen=True, slots=True)
class VerifyOutput:
    """accepted int64 [R]: draft tokens kept; next_tokens int64 [R]: the target's own token behind them."""

    accepted: torch.Tensor
    next_tokens: torch.Tensor


class Verifier(Protocol):
    """Judges a round's draft. Stateless: the same inputs give the same verdict, in any batch order and in a graph."""

    def verify(
        self,
        target_logits: torch.Tensor,
        draft_tokens: torch.Tensor,
        draft_logits: torch.Tensor,
        *,
        sampling: Sampling,
        draft_positions: torch.Tensor,
    ) -> VerifyOutput:
        """How much of each row's draft stays, and the token behind it. Device work only, fixed shapes, no host read.

        target_logits [R, 1 + K, V] any float: column i holds the logits of the token behind draft token i - 1.
        draft_tokens int64 [R, K], -1 where nothing was proposed: the draft ends there, and what stands behind is not
        read. Where a draft ends must not depend on the token that is withheld. draft_logits fp32 [R, K, V]: the
        processed logits they were drawn from, whatever else the draft did to them; -inf where it could not draw.
        sampling: R rows. draft_positions int64 [R]: position of draft token 0.

        A row's text has the target's distribution after temperature, then top_k, then top_p. top_k and top_p do not
        restrict the draft's: a verdict is exact only if q is the law that the draft was drawn from.
        """
        ...

    def draft_seeds(self, seeds: torch.Tensor, draft_positions: torch.Tensor) -> torch.Tensor:
        """The seeds int64 [R] to draw this round's draft with, from the requests' own and the round's positions."""
        ...
