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
    temperature, top_k, top_p, seeds = _checked(logits, sampling)
    if column is not None:
        require_tensor("column", column, shape=(rows,), dtype=torch.int64, device=device)
        column = column.contiguous()
    restricted = process_logits(logits, temperature, column, top_k, top_p)
    restrict_logits(restricted.flatten(0, 1), top_k=top_k, top_p=top_p)
    return draw_target(logits, restricted, temperature, top_k, top_p, seeds, positions.contiguous(), column)


def process_target_logits(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits over the temperature, -inf outside top_k and top_p; fp32 [R, G, V].

    - logits    [R, G, V] any float
    - sampling  R rows

    A restriction never removes a row's largest logits, so greedy rows sample the same tokens with one.
    Raises BatchError for tensors of another shape, dtype or device.
    """
    temperature, top_k, top_p, _ = _checked(logits, sampling)
    out = process_logits(logits, temperature, None, None, None)
    restrict_logits(out.flatten(0, 1), top_k=top_k, top_p=top_p)
    return out


def _checked(logits: torch.Tensor, sampling: Sampling) -> Sampling:
    """The parameters of as many rows as the logits [R, G, V] have, contiguous as kernels read them. Raises BatchError
    for tensors of another shape, dtype or device."""
    rows, device = len(sampling.temperature), logits.device
    require_tensor("logits", logits, shape=(rows, None, None), dtype=logits.dtype, device=device)
    dtypes = (torch.float32, torch.int32, torch.float32, torch.int64)
    for name, tensor, dtype in zip(sampling._fields, sampling, dtypes, strict=True):
        require_tensor(name, tensor, shape=(rows,), dtype=dtype, device=device)
    return Sampling(*(tensor.contiguous() for tensor in sampling))


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
