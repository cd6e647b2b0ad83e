"""The distributions of both models over a round's draft, in torch: the reference for the verification ops."""

from __future__ import annotations

import torch

from spec_decode.sampling import noise
from spec_decode.sampling.kernels.draw_tokens import drawn_tokens
from spec_decode.verification.kernels.verify_arguments import VerifyArguments


class Distributions:
    """Probabilities for R rows, K draft tokens and a vocabulary of V tokens.

    - p                 fp32 [R, 1 + K, V], the target's; NaN where its logits define no distribution
    - q                 fp32 [R, K, V], the draft's; 0 instead of NaN, since no token of a NaN draft is accepted
    - p_token, q_token  fp32 [R, K], of the draft tokens
    - is_argmax         bool [R, K]: the draft token is the target's argmax, of logits that define a distribution
    - uniform           fp32 [R, K], the accept uniforms
    - is_random         bool [R]: sampled, not greedy
    - proposed          bool [R, K]: the draft has not ended. After its end all other fields are undefined and can be
                        NaN
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
        logits = arguments.processed[:, :columns]
        self.is_argmax = (token == logits.argmax(-1)) & logits.amax(-1).isfinite()
        self.proposed = (arguments.draft_tokens >= 0).long().cumprod(1).bool()
        self.is_random = arguments.temperature > 0
        positions = arguments.draft_positions[:, None] + torch.arange(columns)
        keys = noise.key(arguments.accept_seeds[:, None], positions, noise.ACCEPT)
        self.uniform = noise.uniform(keys, torch.zeros_like(keys))

    def next_tokens(self, accepted: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the target's own token int64 [R] after the accepted ones.

        - accepted  int64 [R], number of accepted draft tokens
        - weight    fp32 [R], w: after a rejection the next token is drawn from max(w p - q, 0), normalised

        If the draft ended, it is drawn from p; in greedy rows it is the argmax. NO_TOKEN where p is NaN.
        """
        row, last = torch.arange(len(accepted)), self.q.shape[1] - 1
        at = accepted.clamp(max=last)
        rejected = self.is_random & (accepted <= last) & self.proposed[row, at]
        residual = (weight[:, None] * self.p[row, accepted] - self.q[row, at]).clamp_(min=0)
        # In theory a residual is empty only if p == q, but rounding can empty one too: then draw from p.
        from_residual = rejected & (residual.sum(-1) > 0)
        arguments = self._arguments
        scores = torch.where(from_residual[:, None], residual.log(), arguments.processed[row, accepted])
        positions = arguments.draft_positions + accepted
        return drawn_tokens(scores, arguments.temperature, arguments.seeds, positions)


def count_leading(accepted: torch.Tensor) -> torch.Tensor:
    """Count the leading true columns of accepted bool [R, K]; int64 [R]."""
    return accepted.long().cumprod(1).sum(1)
