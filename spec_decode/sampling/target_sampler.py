"""The target's sampler: processed logits, tokens drawn from them, and logprobs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.errors import require, require_tensor
from spec_decode.sampling.kernels.draw_target import DrawTarget, draw_target
from spec_decode.sampling.kernels.process_logits import ProcessLogits, process_logits
from spec_decode.sampling.kernels.restrict_logits import restrict_logits
from spec_decode.sampling.parameters import Sampling


def sample_target(
    logits: torch.Tensor,
    *,
    sampling: Sampling,
    positions: torch.Tensor,
    column: torch.Tensor | None = None,
    draft_tokens: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample as plain decoding does: one token per row, or per column of a row; int64, in the shape of positions; -1
    from logits with a NaN or +inf among them, or of -inf alone.

    - logits     [R, V] any float, or [R, G, V]
    - sampling   R rows
    - positions  int64 [R], the absolute positions of the tokens; [R, G] for logits [R, G, V]
    - column     int64 [R], 0 to G - 1: the column of logits [R, G, V] to draw from in each row; None: all
    - draft_tokens  int64 [R, G - 1], the tokens after the first that the columns follow, and parents in the same shape:
                    see TreeBatch; no parents for chains. Only read if sampling has edits, and then needed if G > 1

    Raises BatchError for tensors of the wrong shape, dtype or device.
    """
    rows, device = len(logits), logits.device
    shape = (rows,) if column is not None else tuple(logits.shape[:-1])
    require_tensor("positions", positions, shape=shape, dtype=torch.int64, device=device)
    logits = logits[:, None] if column is None and logits.dim() == 2 else logits
    sampling, positions = _checked(logits, sampling), positions.contiguous()
    if column is not None:
        require_tensor("column", column, shape=(rows,), dtype=torch.int64, device=device)
        column = column.contiguous()
    is_copied = torch.empty(rows, dtype=torch.bool, device=device)
    copied = _process(logits, sampling, positions, column, is_copied, draft_tokens, parents)
    return draw_target(
        *DrawTarget(
            logits=logits,
            copied=copied,
            is_copied=is_copied,
            temperature=sampling.temperature,
            seeds=sampling.seeds,
            positions=positions,
            column=column,
        )
    )


def process_target_logits(
    logits: torch.Tensor, sampling: Sampling, positions: torch.Tensor, draft_tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """Return logits with their edits, divided by the temperature, -inf outside top_k, top_p and min_p; fp32
    [R, G, V].

    - logits     [R, G, V] any float
    - sampling   R rows
    - positions  int64 [R], the absolute position of the token that the first column draws
    - draft_tokens  int64 [R, G - 1], the tokens before those of the later columns, as in sample_target

    The three never remove a row's largest logits, so they do not change greedy rows' tokens.
    Raises BatchError for tensors of the wrong shape, dtype or device.
    """
    sampling = _checked(logits, sampling)
    require_tensor("positions", positions, shape=(len(logits),), dtype=torch.int64, device=logits.device)
    return _process(logits, sampling, positions.contiguous(), draft_tokens=draft_tokens)


def _process(
    logits: torch.Tensor,
    sampling: Sampling,
    positions: torch.Tensor,
    column: torch.Tensor | None = None,
    is_copied: torch.Tensor | None = None,
    draft_tokens: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
) -> torch.Tensor:
    edits = {}
    if sampling.edits is not None:
        (rows, columns, vocab), device = logits.shape, logits.device
        require_tensor("counts", sampling.edits.counts, shape=(rows, vocab), dtype=torch.int32, device=device)
        require(
            columns == 1 or draft_tokens is not None,
            f"logits have {columns} columns and sampling has edits, but there are no draft_tokens. Pass the tokens "
            "that the later columns follow.",
        )
        edits = {"positions": positions, **sampling.edits._asdict()}
        for name, tensor in {"draft_tokens": draft_tokens, "parents": parents}.items():
            if tensor is not None and columns > 1:
                require_tensor(name, tensor, shape=(rows, columns - 1), dtype=torch.int64, device=device)
                edits[name] = tensor.contiguous()
    restriction = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_log_p": sampling.min_log_p}
    flags = {} if is_copied is None else {"is_copied": is_copied, **restriction}
    out = process_logits(*ProcessLogits(logits, sampling.temperature, column, **flags, **edits))
    restrict_logits(out.flatten(0, 1), **restriction)
    return out


def _checked(logits: torch.Tensor, sampling: Sampling) -> Sampling:
    """Return the parameters, contiguous as kernels need them. Raises BatchError for tensors of the wrong shape, dtype
    or device; logits [R, G, V] must have as many rows."""
    rows, device = len(sampling.temperature), logits.device
    require_tensor("logits", logits, shape=(rows, None, None), dtype=logits.dtype, device=device)
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64)
    for name, tensor, dtype in zip(sampling._fields, sampling.rows, dtypes, strict=False):
        require_tensor(name, tensor, shape=(rows,), dtype=dtype, device=device)
    return Sampling._make([*(tensor.contiguous() for tensor in sampling.rows), sampling.edits])


class TopLogprobs(NamedTuple):
    """For each token: the token itself, then the N most likely ones at its position, most likely first.

    - ids     int64 [..., 1 + N]
    - values  fp32 [..., 1 + N], the target's logprobs, before all that SamplingParams changes
    """

    ids: torch.Tensor
    values: torch.Tensor

    @classmethod
    def allocate(cls, *shape: int, device: torch.device) -> TopLogprobs:
        """Allocate zeros of this shape."""
        return cls(
            torch.zeros(*shape, dtype=torch.int64, device=device),
            torch.zeros(*shape, dtype=torch.float32, device=device),
        )


def top_logprobs(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> TopLogprobs:
    """Return the logprobs of tokens int64 [..., G] and of the `count` likeliest, from logits [..., G, V]. A negative
    token means no token: its entry is arbitrary. Fixed shapes and device work only."""
    logprobs = logits.float().log_softmax(-1)
    values, ids = logprobs.topk(count)
    tokens = tokens.clamp(min=0)[..., None]
    return TopLogprobs(torch.cat([tokens, ids], -1), torch.cat([logprobs.gather(-1, tokens), values], -1))
