"""Which kernel multiplies rows by a weight."""

from __future__ import annotations

from enum import Enum

import torch

from spec_decode.models.kernels.batch_invariance import is_batch_invariant
from spec_decode.models.kernels.fp8_weight import Fp8Weight, Weight
from spec_decode.models.kernels.skinny_tiling import most_skinny_rows
from spec_decode.models.kernels.streamed_tiling import most_rows, room_of


class ProductKind(Enum):
    """The ways to multiply."""

    BATCH_INVARIANT = "batch_invariant"
    """By `batch_invariant_linear`, where products must be so."""
    SKINNY = "skinny"
    """By `skinny_linear`: one row or two, with what comes before and after in the same kernel."""
    STREAMED = "streamed"
    """By `streamed_linear`: too few rows to keep tensor cores busy, so that reading the weight is what takes time."""
    TORCH = "torch"
    """By torch's own: many rows, and whatever the kernels above cannot read. Never a weight of 8 bits."""


def product_kind(x: torch.Tensor, weight: Weight, *, gated: bool = False, skinny: bool = True) -> ProductKind:
    """How rows x [M, K] are multiplied by weight [N, K], or by what stands beside them in a fused layer.

    gated   weight [2 N, K] holds gate above up
    skinny  False: something comes with the product that the skinny kernel does not do, as a bias is

    It reads host values alone, the same in every replay of a graph.
    """
    if is_batch_invariant():
        return ProductKind.BATCH_INVARIANT
    rows, (n, k) = x.shape[0], weight.shape
    if isinstance(weight, Fp8Weight):
        return ProductKind.SKINNY if skinny and 0 < rows <= most_skinny_rows(n, k) else ProductKind.STREAMED
    if (
        x.dim() != 2
        or not rows
        or x.dtype != weight.dtype
        or x.stride(1) != 1
        or not weight.is_contiguous()
        or not may_launch(x.device)
    ):
        return ProductKind.TORCH
    if skinny and rows <= most_skinny_rows(n, k):
        return ProductKind.SKINNY
    if weight.itemsize == 2 and rows <= most_rows(n, k, room_of(x.device), gated=gated):
        return ProductKind.STREAMED
    return ProductKind.TORCH


def may_launch(device: torch.device) -> bool:
    """Whether products may run in our kernels, which know neither gradients nor autocast."""
    return not torch.is_grad_enabled() and not torch.is_autocast_enabled(device.type)
