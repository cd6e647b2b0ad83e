"""The softmax of attention in plain torch, including sinks of -inf and +inf."""

from __future__ import annotations

import math
from functools import reduce

import torch


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None, block: int | None = None) -> torch.Tensor:
    """Return exp(score) / (sum of exp(score) + exp(sink)) over the last dim, in scores' dtype; differentiable.

    scores  fp32 [..., L], -inf for a token that is not seen
    sinks   fp32, broadcasts to [..., 1]; None or -inf: no sink
    block   tokens per partial sum, from the first on; None: all in one sum

    A row that sees no token gets weights of 0, sink or not, and so does every row with a sink of +inf. NaN stays NaN.
    """
    row_max = scores.amax(-1, keepdim=True)
    if sinks is not None:
        row_max = torch.maximum(row_max, sinks)
    row_max = row_max.clamp(min=torch.finfo(scores.dtype).min)
    weights = torch.exp(scores - row_max)
    parts = weights.split(block or weights.shape[-1], -1)
    total: torch.Tensor = reduce(torch.add, [part.sum(-1, keepdim=True) for part in parts])
    if sinks is not None:
        total = total + torch.where(sinks == math.inf, 1.0, torch.exp(sinks - row_max))
    return weights / total.clamp(min=1e-38)
