"""The target's logits as it is sampled from, and its draw."""

from __future__ import annotations

import torch

from spec_decode.sampling.kernels.draw_tokens import draw_tokens
from spec_decode.sampling.kernels.process_logits import process_logits
from spec_decode.sampling.kernels.restrict_logits import restrict_logits
from spec_decode.sampling.parameters import Sampling


def sample_target(logits: torch.Tensor, *, sampling: Sampling, positions: torch.Tensor) -> torch.Tensor:
    """One token int64 [R] per row of logits [R, V], for absolute positions int64 [R]: plain decoding's sampler."""
    return draw(processed(logits[:, None], sampling), sampling, positions)


def processed(logits: torch.Tensor, sampling: Sampling, column: torch.Tensor | None = None) -> torch.Tensor:
    """Logits [R, G, V], or of each row one column int64 [R]: fp32, over the temperature, -inf outside top_k and top_p.

    No restriction takes a row's largest logits away, so that it leaves greedy rows what they say.
    """
    out = process_logits(logits, sampling.temperature, column)
    restrict_logits(out.flatten(0, 1), top_k=sampling.top_k, top_p=sampling.top_p)
    return out


def draw(logits: torch.Tensor, sampling: Sampling, positions: torch.Tensor) -> torch.Tensor:
    """One token int64 [R] per row of processed logits [R, 1, V]."""
    return draw_tokens(logits[:, 0], temperature=sampling.temperature, seeds=sampling.seeds, positions=positions)
