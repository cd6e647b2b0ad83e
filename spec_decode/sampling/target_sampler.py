"""The target's sampler: its processed logits, a token drawn from them, and the logprobs of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.errors import require_tensor
from spec_decode.sampling.kernels.draw_target import draw_target
from spec_decode.sampling.kernels.process_logits import process_logits
from spec_decode.sampling.kernels.restrict_logits import restrict_logits
from spec_decode.sampling.parameters import Sampling


def sample_target(
    logits: torch.Tensor, *, sampling: Sampling, positions: torch.Tensor, column: torch.Tensor | None = None
) -> torch.Tensor:
    """The sampler of plain decoding: one token per row, or of each of a row's columns, int64 of the shape of positions.

    - logits     [R, V] any float, or [R, G, V]
    - sampling   R rows
    - positions  int64 [R], the absolute positions of the tokens; [R, G] for each column of logits [R, G, V]
    - column     int64 [R], 0 to G - 1: which of a row's logits [R, G, V] are drawn from; None: each

    Raises BatchError for tensors of another shape, dtype or device.
    """
    rows, device = len(logits), logits.device
    shape = (rows,) if column is not None else tuple(logits.shape[:-1])
    require_tensor("positions", positions, shape=shape, dtype=torch.int64, device=device)
    logits = logits[:, None] if column is None and logits.dim() == 2 else logits
    _check(logits, sampling)
    for name, tensor in {"seeds": sampling.seeds, "column": column}.items():
        if tensor is not None:
            require_tensor(name, tensor, shape=(rows,), dtype=torch.int64, device=device)
    temperature, top_k, top_p, seeds = sampling
    restricted = process_logits(logits, temperature, column, top_k, top_p)
    restrict_logits(restricted.flatten(0, 1), top_k=top_k, top_p=top_p)
    return draw_target(
        logits, restricted, temperature, top_k, top_p, seeds.contiguous(), positions.contiguous(), column
    )


def process_target_logits(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits over the temperature, -inf outside top_k and top_p; fp32 [R, G, V].

    - logits    [R, G, V] any float
    - sampling  R rows

    A restriction never removes a row's largest logits, so greedy rows sample the same tokens with one.
    Raises BatchError for tensors of another shape, dtype or device.
    """
    _check(logits, sampling)
    out = process_logits(logits, sampling.temperature, None, None, None)
    restrict_logits(out.flatten(0, 1), top_k=sampling.top_k, top_p=sampling.top_p)
    return out


def _check(logits: torch.Tensor, sampling: Sampling) -> None:
    rows = len(sampling.temperature)
    require_tensor("logits", logits, shape=(rows, None, None), dtype=logits.dtype, device=logits.device)
    require_tensor("temperature", sampling.temperature, shape=(rows,), dtype=torch.float32, device=logits.device)


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
