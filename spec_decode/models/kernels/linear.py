"""x @ weight^T for any number of rows: which kernel multiplies so many, and torch's own for the rest.

Legend: T rows, K inputs, N outputs, B weights.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from spec_decode.models.kernels.batch_invariance import is_batch_invariant
from spec_decode.models.kernels.batch_invariant_linear import batch_invariant_linear
from spec_decode.models.kernels.skinny_linear import is_skinny, skinny_gated_linear, skinny_linear
from spec_decode.models.kernels.streamed_linear import is_streamed, streamed_linear
from spec_decode.models.kernels.swiglu import swiglu


def linear(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight^T, plus residual [T, N] where there is one, for any number of rows: by the kernel of so many."""
    if is_skinny(x) and weight.is_contiguous():
        return skinny_linear(x, weight, residual)
    if is_streamed(x, weight):
        return streamed_linear(x, weight, residual=residual)
    out = plain_linear(x, weight)
    return out if residual is None else residual + out


def plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] @ weight^T + bias: where products are to be batch invariant by that kernel, else by the one that streams
    the weight where that pays, and torch's own for many rows: on a GPU as precise as torch's switches for sums of bf16
    and fp16 say (`torch.backends.cuda.matmul`), which are the process's and stay as they are."""
    if is_streamed(x, weight):
        return streamed_linear(x, weight, bias)
    if not is_batch_invariant():
        return F.linear(x, weight, bias)
    out = batch_invariant_linear(x[:, None], weight[None])[:, 0]
    return out if bias is None else out + bias


def gated_linear(x: torch.Tensor, weight: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """swiglu(x @ weight^T, limit) for any number of rows x [T, K]: weight [2 N, K], gate above up; [T, N]."""
    if is_skinny(x) and weight.is_contiguous() and limit is None:
        return skinny_gated_linear(x, weight)
    if is_streamed(x, weight, gated=True):
        return streamed_linear(x, weight, gated=True, limit=limit)
    return swiglu(plain_linear(x, weight), limit)


def stacked_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, B, K] @ weight [B, N, K]^T, matrix by matrix; [T, B, N], torch's own or batch invariant."""
    if is_batch_invariant():
        return batch_invariant_linear(x, weight)
    return torch.bmm(x.transpose(0, 1), weight.mT).transpose(0, 1)
