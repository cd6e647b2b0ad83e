"""One linear layer per group of rows, of a stack of them: the product at the heart of a mixture of experts."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from spec_decode.models.kernels.batch_invariance import is_batch_invariant
from spec_decode.models.kernels.batch_invariant_linear import batch_invariant_linear

_GATHERED_BYTES = 256 * 2**20
"""Weights copied at a time where no kernel reads them in place."""


def grouped_linear(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """rows [R, K] sorted by group, weight [E, N, K] of one dtype, ends int32 [E]: one past each group's last row.

    [R, N], where a row of group e is row @ weight[e].T. The work is of fixed shape, so a graph can hold it. For bf16 on
    Hopper and Blackwell it is torch's grouped matmul, which reads the weights of groups that have rows, once. Elsewhere
    every row's weight is copied out and multiplied: no group without rows is read here either, but a group with many
    rows is read as often as it has rows. So it is for batch invariant
    products.
    """
    if is_batch_invariant():
        return batch_invariant_linear(rows[:, None], weight, ends)[:, 0]
    return (_grouped_mm if _has_kernel(rows, weight) else _gathered)(rows, weight, ends)


def _has_kernel(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    # Elsewhere torch reads `ends` on the host, which no graph can hold; the kernel's loads are of 16 bytes.
    aligned = weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0
    known = hasattr(F, "grouped_mm") or hasattr(torch, "_grouped_mm")
    if not (known and aligned and rows.is_cuda and rows.dtype == torch.bfloat16):
        return False
    return torch.cuda.get_device_capability(rows.device)[0] in (9, 10)


def _grouped_mm(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    # The public name came with torch 2.10, the private operator before.
    multiply = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm
    out: torch.Tensor = multiply(rows, weight.mT, offs=ends)
    return out


def _gathered(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    count = rows.shape[0]
    group = torch.searchsorted(ends, torch.arange(count, dtype=ends.dtype, device=ends.device), right=True)
    step = max(1, _GATHERED_BYTES // (weight[0].numel() * weight.element_size()))
    parts = [
        torch.bmm(weight[group[start : start + step]], rows[start : start + step, :, None])[..., 0]
        for start in range(0, count, step)
    ]
    return torch.cat(parts)
