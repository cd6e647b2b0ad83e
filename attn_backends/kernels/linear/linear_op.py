"""`linear` as one op, which chooses the kernel when it runs: a compiler traces it once, for any number of rows.

Legend: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch.nn import functional as F

from attn_backends.kernels.linear.fp8_weight import Fp8Weight, Weight, widened
from attn_backends.kernels.linear.linear import linear, variant
from attn_backends.kernels.linear.narrow_linear import product_of_narrow_rows
from attn_backends.kernels.linear.narrow_rows import NarrowRows
from attn_backends.kernels.linear.product_kind import ProductKind, product_kind
from builders.kernels.op import define_op


class LinearArguments(NamedTuple):
    """The arguments of `torch.ops.attn_backends.linear`, which returns x @ weight^T + bias, [M, N] in x's dtype.

    x       16-bit [M, K]
    weight  [N, K], contiguous, in x's dtype or in float8_e4m3fn
    scale   fp32 [N], of an 8-bit weight; None for another
    bias    [N] in x's dtype, or None
    """

    x: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor | None
    bias: torch.Tensor | None

    def reference(self) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(self.x.float(), widened(self.weight, self.scale), bias).to(self.x.dtype)

    def fake(self) -> torch.Tensor:
        return self.x.new_empty(self.x.shape[0], self.weight.shape[0])

    def operands(self) -> tuple[torch.Tensor, Weight, torch.Tensor | None]:
        """Return the arguments of `linear`."""
        if self.scale is None:
            return self.x, self.weight, self.bias
        # Kernels of 8-bit weights read rows whose inputs are contiguous; those of 16-bit ones leave others to torch.
        x = self.x if self.x.stride(1) == 1 else self.x.contiguous()
        return x, Fp8Weight(self.weight, self.scale), self.bias

    def launch(self) -> torch.Tensor:
        x, weight, scale, bias = self
        if scale is None:
            return linear(x, weight, bias)
        if product_kind(x, weight) is ProductKind.NARROW:
            # What `linear` does, without its cost to the host: an Fp8Weight is a module, and rounding would be an op.
            out = product_of_narrow_rows(*NarrowRows(x).launch(), weight, scale, x.dtype)
            return out if bias is None else out + bias
        return linear(*self.operands())

    def variant(self) -> Hashable:
        """See `warm_up`."""
        return variant(*self.operands())


linear_op = define_op("attn_backends::linear", LinearArguments)
"""For callers that no compiler traces; the others use torch.ops."""
