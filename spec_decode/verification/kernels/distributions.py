"""Both models' distributions over a round's draft, in torch: the reference of the ops that verify drafts."""

from __future__ import annotations

import torch

from spec_decode.sampling import noise
from spec_decode.sampling.kernels.draw_tokens import drawn_tokens
from spec_decode.verification.kernels.verify_arguments import VerifyArguments


class Distributions:
    """Probabilities of R rows, K draft tokens and V tokens of the vocabulary.

    - p                 fp32 [R, 1 + K, V], the target's
    - q                 fp32 [R, K, V], the draft's; 0 where it is NaN, of which no token is kept
    - p_token, q_token  fp32 [R, K], of the draft tokens
    - is_argmax         bool [R, K]: the draft token is the target's argmax
    - uniform           fp32 [R, K], the accept uniforms
    - is_random         bool [R]: sampled, not greedy
    - proposed          bool [R, K]: the draft has not ended. After its end every other field may hold garbage, NaN
                        included
    """

    def __init__(self, arguments: VerifyArguments) -> None:
        token, vocab = arguments.draft_tokens, arguments.processed.shape[2]
        known = (token >= 0) & (token < vocab)
        at = (token * known)[..., None]
        columns = token.shape[1]
        self._arguments = arguments
        self.p = arguments.processed.softmax(-1)
        q = arguments.draft_logits.softmax(-1)
        self.q = q.nan_to_num(nan=0.0)
        self.p_token = self.p[:, :columns].gather(2, at)[..., 0].where(known, 0)
        self.q_token = q.gather(2, at)[..., 0].where(known, 0)
        self.is_argmax = token == arguments.processed[:, :columns].argmax(-1)
        self.proposed = (arguments.draft_tokens >= 0).long().cumprod(1).bool()
        self.is_random = arguments.temperature > 0
        positions = arguments.draft_positions[:, None] + torch.arange(columns)
        keys = noise.key(arguments.accept_seeds[:, None], positions, noise.ACCEPT)
        self.uniform = noise.uniform(keys, torch.zeros_like(keys))

    def next_tokens(self, accepted: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The target's own token int64 [R] after the accepted ones.

        - accepted  int64 [R], draft tokens accepted
        - weight    fp32 [R], w: where a draft token was rejected, the next is drawn from max(w p - q, 0), normalised

        It is drawn from p where the draft ended, and is the argmax in greedy rows.
        """
        row, last = torch.arange(len(accepted)), self.q.shape[1] - 1
        at = accepted.clamp(max=last)
        rejected = self.is_random & (accepted <= last) & self.proposed[row, at]
        residual = (weight[:, None] * self.p[row, accepted] - self.q[row, at]).clamp_(min=0)
        # Rounding can empty a residual that is zero in theory only if p == q: then p itself is right.
        from_residual = rejected & (residual.sum(-1) > 0)
        arguments = self._arguments
        scores = torch.where(from_residual[:, None], residual.log(), arguments.processed[row, accepted])
        positions = arguments.draft_positions + accepted
        return drawn_tokens(scores, arguments.temperature, arguments.seeds, positions)


def count_leading(accepted: torch.Tensor) -> torch.Tensor:
    """How many of the first columns of accepted bool [R, K] are all true; int64 [R]."""
    return accepted.long().cumprod(1).sum(1)
