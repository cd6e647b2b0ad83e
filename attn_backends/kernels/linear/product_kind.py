"""Choose the kernel that multiplies rows by a weight."""

from __future__ import annotations

from enum import Enum

import torch

from attn_backends.kernels.linear.batch_invariance import is_batch_invariant
from attn_backends.kernels.linear.fp8_weight import DTYPE, Weight
from attn_backends.kernels.linear.narrow_linear import most_streamed_rows, most_wide_rows, multiplies_narrow_rows
from attn_backends.kernels.linear.skinny_tiling import most_skinny_rows
from attn_backends.kernels.linear.streamed_tiling import MAX_GATED_ROWS, MAX_NARROW_ROWS, most_rows
from builders.devices import room_of


class ProductKind(Enum):
    """The kernels for a product."""

    BATCH_INVARIANT = "batch_invariant"
    """`batch_invariant_linear`, under `batch_invariance`."""
    SKINNY = "skinny"
    """`skinny_linear`: one row or two, fused with the operations around the product."""
    STREAMED = "streamed"
    """`streamed_linear`: too few rows to keep tensor cores busy, so reading the weight takes the time."""
    NARROW_STREAMED = "narrow_streamed"
    """`streamed_linear` of rows rounded to 8 bits: more rows of an 8-bit weight."""
    NARROW = "narrow"
    """`narrow_linear`: torch's product of rows rounded to 8 bits: still more rows."""
    TORCH = "torch"
    """torch's own kernels: many rows, and tensors that the kernels above cannot read. Never an 8-bit weight."""

    @property
    def streams(self) -> bool:
        """Whether `streamed_linear` multiplies, which also adds a bias and a residual."""
        return self in (ProductKind.STREAMED, ProductKind.NARROW_STREAMED)

    @property
    def rounds(self) -> bool:
        """Whether the rows are rounded to 8 bits."""
        return self in (ProductKind.NARROW_STREAMED, ProductKind.NARROW)


def product_kind(x: torch.Tensor, weight: Weight, *, gated: bool = False, skinny: bool = True) -> ProductKind:
    """Choose how to multiply rows x [M, K] by weight [N, K]. In a fused layer, x can be a part of the product's input.

    weight  an 8-bit one, or its values alone
    gated   weight [2 N, K] holds gate above up
    skinny  False: the product comes with something that the skinny kernel cannot fuse, such as a bias

    Uses only host values, which are the same in every replay of a graph.
    """
    if is_batch_invariant():
        return ProductKind.BATCH_INVARIANT
    rows, values = x.shape[0], weight if isinstance(weight, torch.Tensor) else weight.values
    # Many rows first: no graph spares the host the choice, while a GPU may wait for the product.
    if values.dtype == DTYPE:
        n, k = values.shape
        if rows > MAX_NARROW_ROWS and multiplies_narrow_rows(x, values):
            return ProductKind.NARROW
        if rows > most_wide_rows(n, x.device) and multiplies_narrow_rows(x, values):
            streams = rows <= most_streamed_rows(n, k, x.device, gated=gated)
            return ProductKind.NARROW_STREAMED if streams else ProductKind.NARROW
        return ProductKind.SKINNY if skinny and 0 < rows <= most_skinny_rows(n, k) else ProductKind.STREAMED
    if rows > MAX_GATED_ROWS:
        return ProductKind.TORCH
    n, k = values.shape
    if (
        x.dim() != 2
        or not rows
        or x.dtype != values.dtype
        or x.stride(1) != 1
        or not values.is_contiguous()
        or not may_launch(x.device)
    ):
        return ProductKind.TORCH
    if skinny and rows <= most_skinny_rows(n, k):
        return ProductKind.SKINNY
    if values.itemsize == 2 and rows <= most_rows(n, k, room_of(x.device), gated=gated):
        return ProductKind.STREAMED
    return ProductKind.TORCH


def may_launch(device: torch.device) -> bool:
    """Whether products can run in this library's kernels, which support neither gradients nor autocast."""
    return not torch.is_grad_enabled() and not torch.is_autocast_enabled(device.type)
