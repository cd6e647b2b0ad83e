"""The verifier contract, and the base class of lossless verifiers."""

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
    """The result of a verifier for R rows.

    - accepted     int64 [R], number of accepted draft tokens
    - next_tokens  int64 [R], the target's own token after them; -1 if its logits there define no distribution: a NaN or
                   +inf among them, or nothing but -inf. The text ends there
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
        """Return how many draft tokens of each row are accepted, and the token after them.

        Device work only, fixed shapes, no host sync.

        - target_logits    [R, 1 + K, V] any float; column i holds the logits of the token after draft token i - 1. No
                           draft token is accepted at a column that defines no distribution
        - draft_tokens     int64 [R, K]; the first negative one ends a row's draft, and nothing after it is read; one
                           past the vocabulary is rejected. Where a draft ends must not depend on the withheld token
        - draft_logits     fp32 [R, K, V], the processed logits that the draft tokens were drawn from, with all further
                           changes by the draft; -inf for tokens that it could not draw
        - sampling         R rows
        - draft_positions  int64 [R], absolute position of draft token 0

        The accepted text has the target's distribution after the edits, then temperature, then top_k, then top_p. None
        of them applies to the draft: verification is exact only if draft_logits are what the draft was drawn from.
        Small acceptance probabilities are exact down to 2**-64; one within 2**-24 of 1 counts as 1.

        Raises BatchError for tensors of the wrong shape, dtype or device.
        """
        ...

    def draft_seeds(self, seeds: torch.Tensor, draft_positions: torch.Tensor) -> torch.Tensor:
        """Return the seeds int64 [R] for drawing this round's draft.

        - seeds            int64 [R], of the requests
        - draft_positions  int64 [R], absolute position of draft token 0

        By default those of the requests: correct if the result depends on nothing after the rejected token, so that
        later noise is still unused.
        """
        return seeds


class LosslessVerifier(Verifier):
    """Leaves the target's distribution unchanged. A subclass sets `_op`, over both models' processed logits."""

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
        """See Verifier.verify. Drafts must be drawn with draft_seeds(), like the accept uniforms.

        Raises BatchError for tensors of the wrong shape, dtype or device.
        """
        arguments = VerifyArguments(
            processed=process_target_logits(target_logits, sampling, draft_positions, draft_tokens),
            draft_tokens=draft_tokens,
            draft_logits=draft_logits,
            temperature=sampling.temperature,
            seeds=sampling.seeds,
            accept_seeds=self.draft_seeds(sampling.seeds, draft_positions),
            draft_positions=draft_positions,
        )
        return VerifyOutput(*self._op(*arguments.checked()))
