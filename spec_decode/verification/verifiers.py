"""The verifiers, and their names: rejection sampling, block verification and synthetic acceptance."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from builders.errors import require, require_tensor
from spec_decode.sampling.parameters import Sampling
from spec_decode.sampling.target_sampler import sample_target
from spec_decode.verification.base import LosslessVerifier, Verifier, VerifyOutput
from spec_decode.verification.kernels.block_verify import block_verify
from spec_decode.verification.kernels.hash_seeds import hash_seeds
from spec_decode.verification.kernels.rejection_sample import rejection_sample
from spec_decode.verification.kernels.synthetic_accept import synthetic_accept


class RejectionSampling(LosslessVerifier):
    """Accepts the longest prefix of individually accepted tokens; leaves the target's distribution unchanged.

    At temperature 0 it accepts the target's argmax tokens. Otherwise token d is accepted with probability
    min(1, p(d) / q(d)), and the first rejected one is replaced by a draw from max(p - q, 0), normalised
    (Leviathan et al., 2023, appendix A.1).
    """

    _op = staticmethod(rejection_sample)


class BlockVerification(LosslessVerifier):
    """Accepts at least as many tokens as rejection sampling on average; leaves the target's distribution unchanged.

    With r(i) the ratio p / q of draft token i, a draft of n tokens has the weights w(0) = 1 and
    w(i) = min(1, w(i - 1) r(i)). Prefix i < n passes with probability s / (s + 1 - w(i)), where s is the sum of
    max(w(i) p - q, 0) over the token after it, and prefix n with probability w(n). The longest prefix t that passes is
    accepted, even if shorter ones do not pass; the token after it is drawn from max(w(t) p - q, 0), normalised, or from
    p if t = n (Sun et al., 2024, "Block Verification Accelerates Speculative Decoding", algorithm 2). At temperature 0
    it accepts the longest prefix of the target's argmax tokens.

    The output depends on tokens and accept uniforms after the accepted prefix. The next round must not reuse their
    noise at the same positions, or the text drifts from the target's distribution: draw drafts with draft_seeds().
    """

    _op = staticmethod(block_verify)

    def draft_seeds(self, seeds: torch.Tensor, draft_positions: torch.Tensor) -> torch.Tensor:
        """Return different seeds int64 [R] in every round, since no two rounds of a request start at one position.

        - seeds, draft_positions  int64 [R]

        Raises BatchError for tensors of the wrong shape, dtype or device.
        """
        for name, tensor in {"seeds": seeds, "draft_positions": draft_positions}.items():
            require_tensor(name, tensor, shape=(len(seeds),), dtype=torch.int64, device=seeds.device)
        return hash_seeds(seeds.contiguous(), draft_positions.contiguous())


@dataclass(frozen=True, slots=True)
class SyntheticAcceptance(Verifier):
    """Accepts `mean` draft tokens on average over requests and rounds, without reading them: the text is not the
    target's.

    A row accepts floor(mean) tokens, and one more with probability mean - floor(mean): the simplest distribution with
    this mean, to fp32 precision, and the one with the least variance. It accepts no more tokens than proposed, so
    drafts that end early lower the mean. Requests with the same seed and position accept the same number: give them
    different seeds. Raises BatchError for a mean that is not a finite number of 0 or more.
    """

    mean: float

    def __post_init__(self) -> None:
        require(
            0 <= self.mean < math.inf,
            f"the mean of synthetic acceptance is {self.mean}. Pass a finite number of 0 or more.",
        )

    def verify(
        self,
        target_logits: torch.Tensor,
        draft_tokens: torch.Tensor,
        draft_logits: torch.Tensor,
        *,
        sampling: Sampling,
        draft_positions: torch.Tensor,
    ) -> VerifyOutput:
        """See Verifier.verify for shapes. Of draft_logits, only the shape is read, and of target_logits only the column
        of the next token, which is that of plain decoding.

        Raises BatchError for tensors of the wrong shape, dtype or device.
        """
        rows, device = len(draft_tokens), draft_tokens.device
        require_tensor("draft_tokens", draft_tokens, shape=(rows, None), dtype=torch.int64, device=device)
        steps, dtype = draft_tokens.shape[1], target_logits.dtype
        require_tensor("target_logits", target_logits, shape=(rows, 1 + steps, None), dtype=dtype, device=device)
        # Ids of another vocabulary would be accepted, and have no row in the target.
        shape = (rows, steps, target_logits.shape[2])
        require_tensor("draft_logits", draft_logits, shape=shape, dtype=torch.float32, device=device)
        for name, tensor in {"seeds": sampling.seeds, "draft_positions": draft_positions}.items():
            require_tensor(name, tensor, shape=(rows,), dtype=torch.int64, device=device)
        accepted, positions = synthetic_accept(
            draft_tokens.contiguous(), sampling.seeds.contiguous(), draft_positions.contiguous(), self.mean
        )
        next_tokens = sample_target(
            target_logits, sampling=sampling, positions=positions, column=accepted, draft_tokens=draft_tokens
        )
        return VerifyOutput(accepted, next_tokens)


_SYNTHETIC = "synthetic:"
_BY_NAME: dict[str, type[RejectionSampling] | type[BlockVerification]] = {
    "rejection": RejectionSampling,
    "block": BlockVerification,
}


def verifier(name: str = "rejection", *, num_speculative_tokens: int) -> Verifier:
    """Make the verifier named "rejection", "block" or "synthetic:MEAN", with a MEAN of 0 to num_speculative_tokens.

    Raises BatchError for any other name or mean.
    """
    if name.startswith(_SYNTHETIC):
        return SyntheticAcceptance(_mean(name, num_speculative_tokens))
    known = ", ".join([*_BY_NAME, f"{_SYNTHETIC}MEAN"])
    require(
        name in _BY_NAME,
        f"a verifier must be one of {known}, got {name!r}. Choose a listed name.",
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
        f"{name!r}. Write it as {_SYNTHETIC}{limit / 2:g}, or draft more tokens.",
    )
    return mean
