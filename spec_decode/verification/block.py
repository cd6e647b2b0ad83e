"""Block verification: a draft's tokens are judged together, not one by one."""

from __future__ import annotations

import torch

from spec_decode.sampling.parameters import Sampling
from spec_decode.sampling.target import processed
from spec_decode.verification.base import VerifyOutput
from spec_decode.verification.kernels.block_verify import block_verify
from spec_decode.verification.kernels.draft_round import DraftRound
from spec_decode.verification.kernels.hash_seeds import hash_seeds


class BlockVerification:
    """Keeps at least as many tokens as rejection sampling in the mean; leaves the target's distribution unchanged.

    With r(i) the ratio p / q of draft token i, a draft of n tokens has the weights w(0) = 1 and
    w(i) = min(1, w(i - 1) r(i)). Prefix i < n stands with probability s / (s + 1 - w(i)), where s is the sum of
    max(w(i) p - q, 0) over the token behind it, and prefix n with probability w(n). The longest prefix t that stands is
    kept, even over shorter ones that do not; the token behind it is drawn from max(w(t) p - q, 0), normalised, or from
    p if t = n (Sun et al., 2024, "Block Verification Accelerates Speculative Decoding", algorithm 2). Temperature 0
    keeps the longest prefix of the target's argmax tokens.

    The verdict depends on tokens and coins behind the kept prefix. Their noise must not serve again when the next round
    comes to the same positions, or the text drifts from the target's distribution: draw drafts with draft_seeds().
    """

    def verify(
        self,
        target_logits: torch.Tensor,
        draft_tokens: torch.Tensor,
        draft_logits: torch.Tensor,
        *,
        sampling: Sampling,
        draft_positions: torch.Tensor,
    ) -> VerifyOutput:
        """See Verifier.verify. Drafts must be drawn with draft_seeds()."""
        round_ = DraftRound(
            processed=processed(target_logits, sampling),
            draft_tokens=draft_tokens,
            draft_logits=draft_logits,
            temperature=sampling.temperature,
            seeds=sampling.seeds,
            coin_seeds=self.draft_seeds(sampling.seeds, draft_positions),
            draft_positions=draft_positions,
        )
        return VerifyOutput(*block_verify(round_))

    def draft_seeds(self, seeds: torch.Tensor, draft_positions: torch.Tensor) -> torch.Tensor:
        """Other seeds in every round, since no two rounds of a request begin at the same position."""
        return hash_seeds(seeds, draft_positions)
