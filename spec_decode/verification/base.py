"""The contract of a verifier, and what those share that leave the target's distribution unchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from spec_decode.sampling.parameters import Sampling
from spec_decode.sampling.target_sampler import process_target_logits
from spec_decode.verification.kernels.verify_arguments import VerifyArguments


@dataclass(frozen=True, slots=True)
class VerifyOutput:
    """What a verifier returns for R rows.

    - accepted     int64 [R], draft tokens accepted
    - next_tokens  int64 [R], the target's own token after them
    """

    accepted: torch.Tensor
    next_tokens: torch.Tensor


class Verifier(Protocol):
    """Verifies a round's drafts. Stateless: the same inputs give the same output, in any batch order and in a graph."""

    def verify(
        self,
        target_logits: torch.Tensor,
        draft_tokens: torch.Tensor,
        draft_logits: torch.Tensor,
        *,
        sampling: Sampling,
        draft_positions: torch.Tensor,
    ) -> VerifyOutput:
        """How many draft tokens of each row are accepted, and the token after them.

        Device work only, fixed shapes, no host read.

        - target_logits    [R, 1 + K, V] any float; column i holds the logits of the token after draft token i - 1
        - draft_tokens     int64 [R, K]; the first below 0 ends a row's draft, and nothing after it is read; one beyond
                           the vocabulary is rejected. Where a draft ends must not depend on the token that is withheld
        - draft_logits     fp32 [R, K, V], the processed logits that the draft tokens were drawn from, whatever else the
                           draft did to them; -inf where it could not draw
        - sampling         R rows
        - draft_positions  int64 [R], absolute position of draft token 0

        The accepted text has the target's distribution after temperature, then top_k, then top_p. These two do not
        restrict the draft's: verification is exact only if draft_logits are what the draft was drawn from.
        A small probability of acceptance counts in full, down to 2**-64; one within 2**-24 of 1 is 1.

        Raises BatchError for tensors of another shape, dtype or device.
        """
        ...

    def draft_seeds(self, seeds: torch.Tensor, draft_positions: torch.Tensor) -> torch.Tensor:
        """The seeds int64 [R] to draw this round's draft with.

        - seeds            int64 [R], the requests' own
        - draft_positions  int64 [R], absolute position of draft token 0

        By default the requests' own: right where nothing after the rejected token was looked at, so that its noise is
        still unused.
        """
        return seeds


class LosslessVerifier(Verifier):
    """Leaves the target's distribution unchanged, by one op over both models' processed logits, a subclass's."""

    _op: Callable[..., tuple[torch.Tensor, torch.Tensor]]

    def verify(
        self,
        target_logits: torch.Tensor,
        draft_tokens: torch.Tensor,
        draft_logits: torch.Tensor,
        *,
        sampling: Sampling,
        draft_positions: torch.Tensor,
    ) -> VerifyOutput:
        """See Verifier.verify. Drafts, and the accept uniforms, must be drawn with draft_seeds().

        Raises BatchError for tensors of another shape, dtype or device.
        """
        arguments = VerifyArguments(
            processed=process_target_logits(target_logits, sampling),
            draft_tokens=draft_tokens,
            draft_logits=draft_logits,
            temperature=sampling.temperature,
            seeds=sampling.seeds,
            accept_seeds=self.draft_seeds(sampling.seeds, draft_positions),
            draft_positions=draft_positions,
        )
        return VerifyOutput(*self._op(*arguments.checked()))
