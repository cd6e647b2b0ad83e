"""One linear layer per group of rows, of a stack of them: the product at the heart of a mixture of experts."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from spec_decode.models.kernels.batch_invariance import is_batch_invariant
from spec_decode.models.kernels.batch_invariant_linear import batch_invariant_linear
from spec_decode.models.kernels.streamed_linear import streamed_groups
from spec_decode.models.kernels.swiglu import swiglu

MAX_STREAMED_ROWS = 1024
"""Sorted rows up to which weights are streamed: above it groups have so many that torch's kernel is as fast."""


def grouped_linear(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """rows [R, K] sorted by group, weight [E, N, K] of one dtype, ends int32 [E]: one past each group's last row.

    [R, N], where a row of group e is row @ weight[e].T. The work is of fixed shape, so a graph can hold it. Only the
    weights of groups that have rows are read. For many bf16 rows on Hopper and Blackwell it is torch's grouped matmul,
    which reads them once, else a kernel that reads them once for every 16 of a group's rows.
    """
    if is_batch_invariant():
        return batch_invariant_linear(rows[:, None], weight, ends)[:, 0]
    return _grouped_mm(rows, weight, ends) if _is_grouped_mm(rows, weight) else streamed_groups(rows, weight, ends)


def grouped_gated_linear(
    x: torch.Tensor, tokens: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, limit: float | None = None
) -> torch.Tensor:
    """swiglu(grouped_linear(x[tokens], weight, ends), limit), [R, N]; tokens int64 [R], weight [E, 2 N, K]."""
    if is_batch_invariant() or _is_grouped_mm(tokens, weight):
        return swiglu(grouped_linear(x[tokens], weight, ends), limit)
    return streamed_groups(x, weight, ends, tokens, gated=True, limit=limit)


def _is_grouped_mm(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch's kernel is the faster and can: elsewhere it reads `ends` on the host, and it loads 16 bytes."""
    aligned = weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0
    known = hasattr(F, "grouped_mm") or hasattr(torch, "_grouped_mm")
    if not (known and aligned and rows.is_cuda and weight.dtype == torch.bfloat16):
        return False
    many = rows.shape[0] > MAX_STREAMED_ROWS or torch.is_grad_enabled()
    return many and torch.cuda.get_device_capability(rows.device)[0] in (9, 10)


def _grouped_mm(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    # The public name came with torch 2.10, the private operator before.
    multiply = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm
    out: torch.Tensor = multiply(rows, weight.mT, offs=ends)
    return out
