"""Which draft tokens the target keeps, and the token it adds: greedy, and rejection sampling. All on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_decode.ops import noise


@dataclass(frozen=True, slots=True)
class Verdict:
    """accepted int64 [R]: draft tokens kept; next_tokens int64 [R]: the target's own token behind them."""

    accepted: torch.Tensor
    next_tokens: torch.Tensor


def verify(
    target_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    first_positions: torch.Tensor,
) -> Verdict:
    """Keep the longest prefix of each row's draft that the target agrees to. Device work only, no host read.

    target_logits [R, 1 + K, V]: column i holds the logits of the token behind draft token i - 1. draft_tokens int64
    [R, K], -1 where nothing was proposed: the draft ends there. draft_logits fp32 [R, K, V]: the processed logits they
    were drawn from. temperature fp32, seeds int64, first_positions int64 (position of draft token 0), each [R].

    Temperature 0 keeps a token that is the target's argmax. Otherwise token d is kept with probability
    min(1, p(d) / q(d)), and the first refused one is replaced by a draw from max(p - q, 0), normalised, which leaves
    the target's distribution unchanged (Leviathan et al., 2023, appendix A.1).
    """
    rows, columns = draft_tokens.shape
    proposed = draft_tokens >= 0
    token = draft_tokens.clamp(min=0)
    hot = temperature > 0
    scaled = target_logits.float() / torch.where(hot, temperature, 1.0)[:, None, None]
    argmax = scaled.argmax(-1)
    p = scaled.softmax(-1)
    q = draft_logits.softmax(-1)
    p_token = p[:, :columns].gather(2, token[..., None])[..., 0]
    q_token = q.gather(2, token[..., None])[..., 0]
    position = first_positions[:, None] + torch.arange(columns, device=token.device)
    coin = noise.uniform(noise.key(seeds[:, None], position, noise.ACCEPT), torch.zeros_like(token))
    kept = torch.where(hot[:, None], coin * q_token <= p_token, token == argmax[:, :columns]) & proposed
    accepted = kept.long().cumprod(1).sum(1)
    row = torch.arange(rows, device=token.device)
    return Verdict(accepted, _next_tokens(p, q, proposed, argmax, accepted, row, hot, seeds, first_positions))


def _next_tokens(
    p: torch.Tensor,
    q: torch.Tensor,
    proposed: torch.Tensor,
    argmax: torch.Tensor,
    accepted: torch.Tensor,
    row: torch.Tensor,
    hot: torch.Tensor,
    seeds: torch.Tensor,
    first_positions: torch.Tensor,
) -> torch.Tensor:
    last = q.shape[1] - 1
    at = accepted.clamp(max=last)
    refused = (accepted <= last) & proposed[row, at]
    kept_p = p[row, accepted]
    residual = (kept_p - torch.where(refused[:, None], q[row, at], 0.0)).clamp_(min=0)
    # Rounding can leave nothing of a residual that is zero in theory only if p == q: then p itself is right.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, kept_p)
    keys = noise.key(seeds, first_positions + accepted, noise.TARGET)
    vocab = torch.arange(p.shape[-1], device=p.device)
    drawn = (residual.log() + noise.gumbel(keys[:, None], vocab[None])).argmax(-1)
    return torch.where(hot, drawn, argmax[row, accepted])


def sample_target(
    logits: torch.Tensor, *, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """One token int64 [R] per row of logits [R, V], for absolute positions int64 [R]: plain decoding's sampler."""
    hot = temperature > 0
    scaled = logits.float() / torch.where(hot, temperature, 1.0)[:, None]
    keys = noise.key(seeds, positions, noise.TARGET)
    vocab = torch.arange(logits.shape[-1], device=logits.device)
    drawn = (scaled + noise.gumbel(keys[:, None], vocab[None])).argmax(-1)
    return torch.where(hot, drawn, scaled.argmax(-1))
