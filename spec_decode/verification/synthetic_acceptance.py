"""Synthetic acceptance: a set mean accepted length, for benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from builders.errors import require_tensor
from spec_decode.sampling.parameters import Sampling
from spec_decode.sampling.target_sampler import sample_target
from spec_decode.verification.base import Verifier, VerifyOutput
from spec_decode.verification.kernels.synthetic_accept import synthetic_accept


@dataclass(frozen=True, slots=True)
class SyntheticAcceptance(Verifier):
    """Accepts `mean` draft tokens on average over requests and rounds, whatever they are: the text is not the target's.

    A row accepts floor(mean) tokens, and one more with probability mean - floor(mean): the simplest distribution with
    this mean, to fp32's precision, and the one of least spread. It accepts no more than was
    proposed, so drafts that end early lower the mean. Requests of one seed at one position accept the same number: give
    them seeds of their own.
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
        """See Verifier.verify for shapes. draft_logits are not read; the next token is the one plain decoding draws.

        Raises BatchError for tensors of another shape, dtype or device.
        """
        rows, device = len(draft_tokens), draft_tokens.device
        require_tensor("draft_tokens", draft_tokens, shape=(rows, None), dtype=torch.int64, device=device)
        for name, tensor in {"seeds": sampling.seeds, "draft_positions": draft_positions}.items():
            require_tensor(name, tensor, shape=(rows,), dtype=torch.int64, device=device)
        accepted, positions = synthetic_accept(
            draft_tokens.contiguous(), sampling.seeds.contiguous(), draft_positions.contiguous(), self.mean
        )
        return VerifyOutput(
            accepted, sample_target(target_logits, sampling=sampling, positions=positions, column=accepted)
        )
