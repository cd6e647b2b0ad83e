"""What LogitEdits does to logits before the temperature: a stage of `process_logits`, in Triton and torch."""

from __future__ import annotations

import torch

from builders.kernels.triton_runtime import tl, triton
from spec_decode.sampling.logit_edits import Penalties


def add_biases(
    x: torch.Tensor,
    positions: torch.Tensor,
    num_biases: torch.Tensor,
    bias_tokens: torch.Tensor,
    biases: torch.Tensor,
    bias_ends: torch.Tensor,
) -> None:
    """Torch reference, in place: x fp32 [R, G, V], positions int64 [R, G] of the tokens to draw; LogitEdits has the
    others."""
    count = int(num_biases.max())
    tokens, added = bias_tokens[:, None, :count].long(), biases[:, None, :count]
    applies = (torch.arange(count) < num_biases[:, None, None]) & (positions[..., None] < bias_ends[:, None, :count])
    tokens, added = tokens.where(applies, 0), added.where(applies, 0.0)
    x.scatter_add_(2, tokens, added)


def is_penalised(penalties: torch.Tensor) -> torch.Tensor:
    """Return whether penalties fp32 [R, 3] change each row: bool [R]."""
    return (penalties != torch.tensor(Penalties())).any(1)


def apply_penalties(
    x: torch.Tensor,
    penalties: torch.Tensor,
    counts: torch.Tensor,
    draft_tokens: torch.Tensor | None,
    parents: torch.Tensor | None,
    column: torch.Tensor | None,
) -> None:
    """Torch reference, in place: x fp32 [R, G, V]; ProcessLogits has the others."""
    rows = is_penalised(penalties).nonzero()[:, 0]
    drafted = torch.zeros(len(rows), 1, x.shape[2], dtype=torch.int32)  # by query token: the counts of its path
    for i in range(0 if draft_tokens is None else draft_tokens.shape[1]):
        assert draft_tokens is not None
        parent = torch.full((len(rows),), i) if parents is None else parents[rows, i].clamp(0, i)
        token = draft_tokens[rows, i, None] == torch.arange(x.shape[2])
        path = drafted[torch.arange(len(rows)), parent] + token
        drafted = torch.cat([drafted, path[:, None]], 1)
    if column is not None:
        drafted = drafted[torch.arange(len(rows)), column[rows]][:, None]
    times = (counts[rows, None] >> 1) + drafted
    repetition, presence, frequency = penalties[rows, :, None, None].unbind(1)
    old, in_text = x[rows], (times > 0) | (counts[rows, None] > 0)
    new = torch.where(in_text, torch.where(old > 0, old / repetition, old * repetition), old)
    x[rows] = new - frequency * times - presence * (times > 0)


@triton.jit
def has_penalties(penalties_ptr, row):
    """Return whether penalties fp32 [R, 3] change the row."""
    ptr = penalties_ptr + row * 3
    return (tl.load(ptr) != 1.0) | (tl.load(ptr + 1) != 0.0) | (tl.load(ptr + 2) != 0.0)


@triton.jit
def with_penalties(
    x,  # fp32 [BLOCK_V]
    offs_v,  # their tokens
    mask,
    row,
    query,  # the query token whose logits these are: 0 for the root, 1 + i for draft token i
    penalties_ptr,  # fp32 [R, 3]
    counts_ptr,  # int32 [R, V]
    draft_tokens_ptr,  # int64 [R, K], or None without drafts
    parents_ptr,  # int64 [R, K], or None for chains
    vocab_size,  # V
    stride_draft,
    stride_parents,
):
    """Return logits with the penalties of their row, which has some, for its text and the query token's path."""
    counts = tl.load(counts_ptr + row * vocab_size + offs_v, mask=mask, other=0)
    if draft_tokens_ptr is not None:
        while query > 0:
            token = tl.load(draft_tokens_ptr + row * stride_draft + query - 1).to(tl.int32)
            counts += tl.where(offs_v == token, 2, 0)
            if parents_ptr is None:
                query -= 1
            else:
                query = tl.minimum(tl.load(parents_ptr + row * stride_parents + query - 1), query - 1)
    times = counts >> 1
    repetition = tl.load(penalties_ptr + row * 3)
    presence = tl.load(penalties_ptr + row * 3 + 1)
    frequency = tl.load(penalties_ptr + row * 3 + 2)
    x = tl.where(counts > 0, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
    return x - frequency * times.to(tl.float32) - tl.where(times > 0, presence, 0.0)


@triton.jit
def with_biases(
    x,  # fp32 [BLOCK_V]
    offs_v,  # their tokens
    row,
    position,  # of the token to draw
    num_biases,  # of the row
    bias_tokens_ptr,  # int32 [R, N]
    biases_ptr,  # fp32 [R, N]
    bias_ends_ptr,  # int64 [R, N]
    stride_bias_row,
):
    """Return logits with the biases of their row that have not ended before this position."""
    for i in range(0, num_biases):
        offs = row * stride_bias_row + i
        if position < tl.load(bias_ends_ptr + offs):
            x = tl.where(offs_v == tl.load(bias_tokens_ptr + offs), x + tl.load(biases_ptr + offs), x)
    return x
