"""Block verification: a draft's tokens are judged together, not one by one."""

from __future__ import annotations

import torch

from spec_decode.ops import noise
from spec_decode.sampling import Sampling
from spec_decode.verification.base import Verdict
from spec_decode.verification.sampling import Round, leading

_ROUND = 0x510E527F
"""The stream that gives every round seeds of its own."""

_TINY = torch.finfo(torch.float32).tiny


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
        first_positions: torch.Tensor,
    ) -> Verdict:
        """See Verifier.verify. Drafts must be drawn with draft_seeds()."""
        round_ = Round.of(target_logits, draft_tokens, draft_logits, sampling=sampling, first_positions=first_positions)
        weights = _weights(round_)
        keys = noise.key(self.draft_seeds(sampling.seeds, first_positions)[:, None], round_.positions, noise.ACCEPT)
        stands = _stands(round_, weights, noise.uniform(keys, torch.zeros_like(keys)))
        lengths = torch.arange(1, 1 + stands.shape[1], device=stands.device)
        accepted = torch.where(round_.hot, (stands * lengths).amax(1), leading(round_.greedy & round_.proposed))
        weight = torch.where(accepted > 0, weights.gather(1, (accepted - 1).clamp(min=0)[:, None])[:, 0], 1.0)
        return Verdict(accepted, round_.next_tokens(accepted, weight))

    def draft_seeds(self, seeds: torch.Tensor, first_positions: torch.Tensor) -> torch.Tensor:
        """Other seeds in every round, since no two rounds of a request begin at the same position."""
        return noise.key(seeds, first_positions, _ROUND)


def _weights(round_: Round) -> torch.Tensor:
    """w(1) to w(K), fp32 [R, K]: a product capped at 1 at each step is, in logarithms, a walk under a ceiling of 0."""
    walk = (round_.p_token / round_.q_token.clamp(min=_TINY)).log().cumsum(1)
    return (walk - walk.cummax(1).values.clamp(min=0)).exp()


def _stands(round_: Round, weights: torch.Tensor, coin: torch.Tensor) -> torch.Tensor:
    """Which prefixes, of lengths 1 to K, stand on their own coin; bool [R, K]."""
    columns = weights.shape[1]
    excess = (weights[:, :-1, None] * round_.p[:, 1:columns] - round_.q[:, 1:]).clamp_(min=0).sum(-1)
    excess = torch.nn.functional.pad(excess, (0, 1))
    ends = ~torch.nn.functional.pad(round_.proposed[:, 1:], (0, 1))
    chance = torch.where(ends, weights, excess)
    whole = torch.where(ends, 1.0, excess + 1 - weights)
    return (coin * whole <= chance) & round_.proposed
