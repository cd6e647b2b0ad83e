"""x @ weight^T for any number of rows, with the kernel that `product_kind` chooses.

Legend: M rows, K inputs, N outputs, B weights.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.nn import functional as F

from attn_backends.kernels.linear.batch_invariance import is_batch_invariant
from attn_backends.kernels.linear.batch_invariant_linear import batch_invariant_linear
from attn_backends.kernels.linear.fp8_weight import Fp8Weight, Weight, operands
from attn_backends.kernels.linear.narrow_linear import narrow_linear
from attn_backends.kernels.linear.product_kind import ProductKind, product_kind
from attn_backends.kernels.linear.skinny_linear import skinny_gated_linear, skinny_linear
from attn_backends.kernels.linear.streamed_linear import StreamedLinear, streamed_linear
from attn_backends.kernels.linear.swiglu import swiglu

_SLOW_ROWS, _EXTRA_ROWS = (320, 448), 8
"""Rows that cuBLAS can multiply by a gate in tiles too narrow to be fast, and how many more cure it: five gates took
0.71 to 1.06 of the time with 328 rows instead of 320, and 0.58 to 1.01 with 456 instead of 448, where Llama 3's took
177 us instead of 303 (H100, CUDA 13.0, without the copy)."""


def linear(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x [M, K] @ weight [N, K]^T, plus bias [N] and residual [M, N] if given; [M, N].

    torch's own GPU products follow the process-wide precision switches for bf16 and fp16 sums
    (`torch.backends.cuda.matmul`), which stay as they are.
    """
    kind = product_kind(x, weight, skinny=bias is None)
    if kind is ProductKind.TORCH and isinstance(weight, torch.Tensor):
        out = F.linear(x, weight, bias)
    elif kind is ProductKind.SKINNY:
        return skinny_linear(x, weight, residual)
    elif kind.streams:
        return streamed_linear(x, weight, bias, residual, round_x=kind.rounds)
    else:
        if isinstance(weight, Fp8Weight) and kind is ProductKind.NARROW:
            out = narrow_linear(x, weight)
        else:
            out = batch_invariant_linear(x[:, None], weight[None])[:, 0]
        out = out if bias is None else out + bias
    return out if residual is None else residual + out


def variant(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> Hashable:
    """Return what the kernels that `linear` launches last depend on, beside the shapes of the weight and the bias: with
    an equal one, no other is compiled."""
    kind = product_kind(x, weight, skinny=bias is None)
    if kind is ProductKind.SKINNY:
        return kind, x.shape[0]
    if not kind.streams:
        return kind
    values, scale = operands(weight)
    product = StreamedLinear(x, values, scale=scale, round_x=kind.rounds)
    # More rows are multiplied in parts, of which only the last has fewer rows than a launch takes.
    last = product._replace(x=x[: (x.shape[0] - 1) % product.most_rows + 1])
    return kind, last.cut()


def gated_linear(x: torch.Tensor, weight: Weight, limit: float | None = None) -> torch.Tensor:
    """Return swiglu(x @ weight^T, limit), [M, N], for rows x [M, K] and weight [2 N, K], gate above up."""
    kind = product_kind(x, weight, gated=True, skinny=limit is None)
    if kind is ProductKind.SKINNY:
        return skinny_gated_linear(x, weight)
    if kind.streams:
        return streamed_linear(x, weight, gated=True, limit=limit, round_x=kind.rounds)
    rows = x.shape[0]
    if kind is ProductKind.TORCH and rows in _SLOW_ROWS:
        x = F.pad(x, (0, 0, 0, _EXTRA_ROWS))
    return swiglu(linear(x, weight)[:rows], limit)


def stacked_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x [M, B, K] @ weight [B, N, K]^T, matrix by matrix; [M, B, N]. torch's own, or batch invariant."""
    if is_batch_invariant():
        return batch_invariant_linear(x, weight)
    return torch.bmm(x.transpose(0, 1), weight.mT).transpose(0, 1)
