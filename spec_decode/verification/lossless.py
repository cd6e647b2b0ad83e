"""What the verifiers share that leave the target's distribution unchanged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from spec_decode.sampling.parameters import Sampling
from spec_decode.sampling.target_sampler import process_target_logits
from spec_decode.verification.base import VerifyOutput
from spec_decode.verification.kernels.verify_arguments import VerifyArguments


class LosslessVerifier(ABC):
    """Verifies with one op over both models' processed logits; subclasses name the op and the draft's seeds."""

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
        """See Verifier.verify for shapes. Drafts must be drawn with draft_seeds().

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

    @abstractmethod
    def draft_seeds(self, seeds: torch.Tensor, draft_positions: torch.Tensor) -> torch.Tensor:
        """See Verifier.draft_seeds. The accept uniforms are drawn with these seeds too."""
