"""A streamed linear that returns its split-K partial sums, for the next norm to add in its own kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from attn_backends.kernels.linear.fp8_weight import Weight, operands, widened
from attn_backends.kernels.linear.narrow_rows import NarrowRows
from attn_backends.kernels.linear.streamed_linear import StreamedLinear, launch_sum_shares
from builders.kernels.op import define_op
from builders.kernels.triton_runtime import stored_as


def streamed_shares(x: torch.Tensor, weight: Weight, *, round_x: bool = False) -> torch.Tensor:
    """Return fp32 [S, M, N]; its sum over S is x [M, K] @ weight [N, K]^T. S is `num_shares`, 2 or more.

    For a product that is ProductKind.STREAMED, or NARROW_STREAMED with round_x. Raises BatchError for shapes or dtypes
    that do not fit.
    """
    arguments = StreamedShares(x, *operands(weight), round_x)
    arguments.product.checked()
    return _streamed_shares(*arguments)


def sum_shares(shares: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return x + shares.sum(0), added in fp32 and rounded once. shares: fp32 [S, M, N]; x: [M, N]; all contiguous."""
    return _sum_shares(shares, x)


class StreamedShares(NamedTuple):
    """The arguments of `streamed_shares`. scale: fp32 [N] for a weight in float8_e4m3fn, else None. round_x: see
    `streamed_linear`."""

    x: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor | None = None
    round_x: bool = False

    @property
    def product(self) -> StreamedLinear:
        """The product to split."""
        return StreamedLinear(self.x, self.weight, scale=self.scale, round_x=self.round_x)

    def reference(self) -> torch.Tensor:
        share, wide = self.product.cut().share, widened(self.weight, self.scale)
        x = widened(*NarrowRows(self.x).reference()) if self.round_x else self.x.float()
        parts = zip(x.split(share, 1), wide.split(share, 1), strict=True)
        return torch.stack([F.linear(x, weight) for x, weight in parts])

    def fake(self) -> torch.Tensor:
        cut = self.product.cut()
        return self.x.new_empty(cut.shares, self.x.shape[0], self.weight.shape[0], dtype=torch.float32)

    def launch(self) -> torch.Tensor:
        out = self.fake()
        product = self.product
        product.multiply(out, product.cut())
        return out


class SumShares(NamedTuple):
    """The arguments of `sum_shares`."""

    shares: torch.Tensor
    x: torch.Tensor

    def reference(self) -> torch.Tensor:
        return (self.x.float() + self.shares.sum(0)).to(self.x.dtype)

    def fake(self) -> torch.Tensor:
        return torch.empty_like(self.x)

    def launch(self) -> torch.Tensor:
        out = self.fake()
        stored = stored_as(out)
        launch_sum_shares(self.shares, stored, None, self.x)
        return stored.to(out.dtype)


_streamed_shares = define_op("attn_backends::streamed_shares", StreamedShares)
_sum_shares = define_op("attn_backends::sum_shares", SumShares)
