"""Add biases to single tokens' logits, before the temperature: a stage of `process_logits`, in Triton and torch."""

from __future__ import annotations

import torch

from builders.kernels.triton_runtime import tl, triton


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


@triton.jit
def with_biases(
    x,  # fp32 [BLOCK_V]
    offs_v,  # their tokens
    row,
    position,  # of the token to draw
    num_biases_ptr,  # int32 [R]
    bias_tokens_ptr,  # int32 [R, N]
    biases_ptr,  # fp32 [R, N]
    bias_ends_ptr,  # int64 [R, N]
    stride_bias_row,
):
    """Return logits with the biases of their row that have not ended before this position."""
    for i in range(0, tl.load(num_biases_ptr + row)):
        offs = row * stride_bias_row + i
        if position < tl.load(bias_ends_ptr + offs):
            x = tl.where(offs_v == tl.load(bias_tokens_ptr + offs), x + tl.load(biases_ptr + offs), x)
    return x
