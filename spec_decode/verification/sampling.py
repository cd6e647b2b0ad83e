"""What the verifiers share: both models' distributions over a round's draft, and the target's draw."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_decode.ops import noise


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """R drafts of up to K tokens under both models.

    p fp32 [R, 1 + K, V], q fp32 [R, K, V]: the target's and the draft's distributions of each token; p_token, q_token
    fp32 [R, K]: those of the draft's tokens. greedy bool [R, K]: the draft token is the target's argmax [R, 1 + K].
    proposed bool [R, K]: the draft has not ended; behind its end every other field may hold garbage, NaN included.
    hot bool [R]: sampled, not greedy. seeds, first_positions int64 [R].
    """

    p: torch.Tensor
    q: torch.Tensor
    p_token: torch.Tensor
    q_token: torch.Tensor
    argmax: torch.Tensor
    greedy: torch.Tensor
    proposed: torch.Tensor
    hot: torch.Tensor
    seeds: torch.Tensor
    first_positions: torch.Tensor

    @classmethod
    def of(
        cls,
        target_logits: torch.Tensor,
        draft_tokens: torch.Tensor,
        draft_logits: torch.Tensor,
        *,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        first_positions: torch.Tensor,
    ) -> Round:
        """From the arguments of Verifier.verify."""
        columns = draft_tokens.shape[1]
        token = draft_tokens.clamp(min=0)
        hot = temperature > 0
        scaled = target_logits.float() / torch.where(hot, temperature, 1.0)[:, None, None]
        argmax = scaled.argmax(-1)
        p = scaled.softmax(-1)
        q = draft_logits.softmax(-1)
        return cls(
            p=p,
            q=q,
            p_token=p[:, :columns].gather(2, token[..., None])[..., 0],
            q_token=q.gather(2, token[..., None])[..., 0],
            argmax=argmax,
            greedy=token == argmax[:, :columns],
            proposed=(draft_tokens >= 0).long().cumprod(1).bool(),
            hot=hot,
            seeds=seeds,
            first_positions=first_positions,
        )

    @property
    def positions(self) -> torch.Tensor:
        """Absolute positions int64 [R, K] of the draft's tokens."""
        return self.first_positions[:, None] + torch.arange(self.q.shape[1], device=self.q.device)

    def next_tokens(self, accepted: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """The target's own token int64 [R] behind `accepted` int64 [R] draft tokens.

        Greedy rows: its argmax. Hot rows: a draw from max(weight * p - q, 0), normalised, if a draft token was refused
        there, and from p if the draft ended. weight fp32 [R] is 1 if not given.
        """
        row = torch.arange(len(accepted), device=accepted.device)
        last = self.q.shape[1] - 1
        at = accepted.clamp(max=last)
        refused = ((accepted <= last) & self.proposed[row, at])[:, None]
        p = self.p[row, accepted]
        wanted = p if weight is None else torch.where(refused, weight[:, None], 1.0) * p
        residual = (wanted - torch.where(refused, self.q[row, at], 0.0)).clamp_(min=0)
        # Rounding can leave nothing of a residual that is zero in theory only if p == q: then p itself is right.
        residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
        drawn = _draw(residual.log(), self.seeds, self.first_positions + accepted)
        return torch.where(self.hot, drawn, self.argmax[row, accepted])


def leading(kept: torch.Tensor) -> torch.Tensor:
    """How many of the first columns of kept bool [R, K] are all true; int64 [R]."""
    return kept.long().cumprod(1).sum(1)


def sample_target(
    logits: torch.Tensor, *, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """One token int64 [R] per row of logits [R, V], for absolute positions int64 [R]: plain decoding's sampler."""
    hot = temperature > 0
    scaled = logits.float() / torch.where(hot, temperature, 1.0)[:, None]
    return torch.where(hot, _draw(scaled, seeds, positions), scaled.argmax(-1))


def _draw(log_weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    keys = noise.key(seeds, positions, noise.TARGET)
    vocab = torch.arange(log_weights.shape[-1], device=log_weights.device)
    return (log_weights + noise.gumbel(keys[:, None], vocab[None])).argmax(-1)
