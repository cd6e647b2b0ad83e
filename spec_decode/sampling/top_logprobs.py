"""Logprobs of the tokens of a text, and of the most likely tokens in their place."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TopLogprobs(NamedTuple):
    """Of each token the token itself, then the N most likely ones in its place, most likely first.

    - ids     int64 [..., 1 + N]
    - values  fp32 [..., 1 + N], the target's logprobs, before temperature, top_k and top_p
    """

    ids: torch.Tensor
    values: torch.Tensor

    @classmethod
    def allocate(cls, *shape: int, device: torch.device) -> TopLogprobs:
        """Zeros of this shape."""
        return cls(
            torch.zeros(*shape, dtype=torch.int64, device=device),
            torch.zeros(*shape, dtype=torch.float32, device=device),
        )


def top_logprobs(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> TopLogprobs:
    """Of tokens int64 [..., G] drawn from logits [..., G, V]; below 0 is no token, and its own entry anything. Fixed
    shapes and device work only."""
    logprobs = logits.float().log_softmax(-1)
    values, ids = logprobs.topk(count)
    tokens = tokens.clamp(min=0)[..., None]
    return TopLogprobs(torch.cat([tokens, ids], -1), torch.cat([logprobs.gather(-1, tokens), values], -1))
