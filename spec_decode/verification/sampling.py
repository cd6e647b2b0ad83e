"""What the verifiers share: both models' distributions over a round's draft, and the target's draw."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_decode.ops import noise
from spec_decode.ops.restrict_logits import restrict_logits
from spec_decode.sampling import Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """R drafts of up to K tokens under both models.

    p fp32 [R, 1 + K, V], q fp32 [R, K, V]: the distributions of each token, the target's after temperature, top_k and
    top_p, and the draft's as it was drawn from; p_token, q_token fp32 [R, K]: those of the draft's tokens. greedy bool
    [R, K]: the draft token is the target's argmax [R, 1 + K].
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
        sampling: Sampling,
        first_positions: torch.Tensor,
    ) -> Round:
        """From the arguments of Verifier.verify."""
        columns = draft_tokens.shape[1]
        token = draft_tokens.clamp(min=0)
        processed, argmax = _process(target_logits, sampling)
        p = processed.softmax(-1)
        q = draft_logits.softmax(-1)
        return cls(
            p=p,
            q=q,
            p_token=p[:, :columns].gather(2, token[..., None])[..., 0],
            q_token=q.gather(2, token[..., None])[..., 0],
            argmax=argmax,
            greedy=token == argmax[:, :columns],
            proposed=(draft_tokens >= 0).long().cumprod(1).bool(),
            hot=sampling.temperature > 0,
            seeds=sampling.seeds,
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


def sample_target(logits: torch.Tensor, *, sampling: Sampling, positions: torch.Tensor) -> torch.Tensor:
    """One token int64 [R] per row of logits [R, V], for absolute positions int64 [R]: plain decoding's sampler."""
    processed, argmax = _process(logits, sampling)
    return torch.where(sampling.temperature > 0, _draw(processed, sampling.seeds, positions), argmax)


def _process(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits fp32 [R, ..., V] over the temperature, -inf outside top_k and top_p; and the argmax int64 [R, ...]."""
    temperature = sampling.temperature.view(-1, *[1] * (logits.dim() - 1))
    processed = (logits.float() / torch.where(temperature > 0, temperature, 1.0)).contiguous()
    argmax = processed.argmax(-1)
    restrict_logits(processed.view(-1, logits.shape[-1]), top_k=sampling.top_k, top_p=sampling.top_p)
    return processed, argmax


def _draw(log_weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    keys = noise.key(seeds, positions, noise.TARGET)
    vocab = torch.arange(log_weights.shape[-1], device=log_weights.device)
    return (log_weights + noise.gumbel(keys[:, None], vocab[None])).argmax(-1)
