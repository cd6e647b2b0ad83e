"""Linear layers fused with the operations around them, grouped products, and embeddings: one kernel if rows are few
enough for it to pay, torch's own kernels otherwise."""

from __future__ import annotations

from typing import ClassVar, TypeGuard

import torch
from torch import nn
from torch.nn import functional as F

from attn_backends.kernels.linear.batch_invariant_linear import batch_invariant_linear
from attn_backends.kernels.linear.fp8_weight import Fp8Weight, Weight
from attn_backends.kernels.linear.linear import gated_linear, linear
from attn_backends.kernels.linear.narrow_linear import MAX_WIDE_SORTED_ROWS, multiplies_narrow_rows, narrow_groups
from attn_backends.kernels.linear.product_kind import ProductKind, product_kind
from attn_backends.kernels.linear.skinny_linear import embed_linear, norm_linear
from attn_backends.kernels.linear.streamed_linear import num_shares, streamed_groups
from attn_backends.kernels.linear.streamed_shares import streamed_shares, sum_shares
from attn_backends.kernels.linear.swiglu import swiglu
from spec_decode.model_api import is_batch_invariant
from spec_decode.models.kernels.embed_concat import embed_concat
from spec_decode.models.layers.rms_norm import RMSNorm

ResidualStream = tuple[torch.Tensor, torch.Tensor | None]
"""Hidden states x [T, H] and a pending delta, which the next norm or `joined` adds: [T, H], or fp32 [S, T, H] whose sum
over S it is, or None."""


def joined(x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
    """Add the pending delta of a ResidualStream to x [T, H]."""
    if delta is None:
        return x
    return sum_shares(delta, x) if delta.dim() > x.dim() else x + delta


class FusingLinear(nn.Module):
    """weight [N, K], and bias [N] or None. Subclasses fuse more into the product if rows are few and have no gradient.

    A bias is never fused. `product_kind` decides which row counts are few.
    """

    weight: Weight
    bias: torch.Tensor | None

    def __init__(self, inputs: int, *outputs: int, bias: bool = False) -> None:
        """outputs: rows of the weight, or of each matrix stacked in it."""
        super().__init__()
        layer = nn.Linear(inputs, sum(outputs), bias=bias)
        self.weight, self.bias = layer.weight, layer.bias
        self.outputs = outputs

    def fuses(self, x: torch.Tensor) -> bool:
        """Whether x [T, ...] has few enough rows for the fused kernel."""
        return self.bias is None and product_kind(x, self.weight) is ProductKind.SKINNY

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return only the linear layer's output [T, N] for x [T, K], with its bias."""
        return linear(x, self.weight, self.bias)


class Linear(FusingLinear):
    """A linear layer with nothing fused."""

    @classmethod
    def of(cls, weight: nn.Parameter) -> Linear:
        """Return the layer with this weight [N, K]."""
        with torch.device("meta"):
            layer = cls(weight.shape[1], weight.shape[0])
        layer.weight = weight
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, N] for x [T, K]."""
        return self.product(x)


class NormLinear(FusingLinear):
    """Residual addition and RMS norm, then a linear layer."""

    gated: ClassVar[bool] = False

    def forward(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: RMSNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + delta, [T, K], and the layer's output for its norm, or for the sum itself: [T, N] ([T, I] with a
        gate)."""
        if norm is None:
            x = normed = joined(x, delta)
        # Only the norm kernel sums the shares of a delta.
        elif self.fuses(x) and (delta is None or delta.dim() == x.dim()):
            return norm_linear(x, delta, norm.weight, norm.eps, self.weight, self.gated)
        else:
            x, normed = norm(x, delta)
        return x, gated_linear(normed, self.weight) if self.gated else self.product(normed)


class NormGateUp(NormLinear):
    """Residual addition and RMS norm, then gate and up projection (weight [2 I, K], gate first) and SwiGLU."""

    gated = True


class NormGateUpGelu(NormLinear):
    """The same with GeGLU, which is not fused into the product."""

    def forward(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: RMSNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + delta, [T, K], and the gated output, [T, I]."""
        x, gate_up = super().forward(x, delta, norm)
        return x, swiglu(gate_up, gelu=True)


class ResidualLinear(FusingLinear):
    """A linear layer with its output added to the residual: in the same kernel if possible, else by the next norm."""

    def forward(self, inputs: torch.Tensor, x: torch.Tensor) -> ResidualStream:
        """Return the sum and None, or x and the pending delta, for inputs [T, K] and x [T, N]."""
        kind = product_kind(inputs, self.weight, skinny=self.bias is None)
        shares = kind.streams and self.bias is None and num_shares(inputs, self.weight, round_x=kind.rounds) > 1
        if shares:
            return x, streamed_shares(inputs, self.weight, round_x=kind.rounds)
        if kind is ProductKind.SKINNY or kind.streams:
            return linear(inputs, self.weight, self.bias, x), None
        return x, self.product(inputs)


class EmbedLinear(FusingLinear):
    """A linear layer over the concatenation of a token's embedding and a hidden state, each of K / 2 dims."""

    def forward(self, token_ids: torch.Tensor, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return [T, N] for token_ids int64 [T], embedding [V, K / 2] and hidden [T, K / 2]."""
        if self.fuses(hidden):
            return embed_linear(token_ids, embedding, hidden, self.weight)
        return self.product(embed_concat(token_ids, embedding, hidden))


MAX_STREAMED_ROWS = 1024
"""Up to this many sorted rows, weights are streamed; above it, groups are so large that torch's kernel is as fast."""


def grouped_linear(
    rows: torch.Tensor, weight: Weight, ends: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply rows [R, K], sorted by group, by their group's weight: row @ weight[e].T + bias[e] for group e, [R, N].

    weight: [E, N, K] in the rows' dtype or in 8 bits. bias: [E, N] in the rows' dtype, or None. ends: int32 [E], one
    past each group's last row. The work has a fixed shape, so a graph can hold it. Only the weights of groups with rows
    are read: by torch's grouped matmul once, for many rows on Hopper and Blackwell, else by a kernel once for every 16
    rows of a group. Many rows of an 8-bit weight are rounded to 8 bits.
    """
    if is_batch_invariant():
        out = batch_invariant_linear(rows[:, None], weight, ends)[:, 0]
    elif _is_narrow(weight, rows, rows):
        out = narrow_groups(rows, weight, ends)
    elif _is_grouped_mm(weight, rows):
        out = _grouped_mm(rows, weight, ends)
    else:
        return streamed_groups(rows, weight, ends, bias=bias)
    return _biased(out, ends, bias)


def grouped_gated_linear(
    x: torch.Tensor,
    tokens: torch.Tensor,
    weight: Weight,
    ends: torch.Tensor,
    limit: float | None = None,
    *,
    bias: torch.Tensor | None = None,
    alpha: float | None = None,
) -> torch.Tensor:
    """Return swiglu(grouped_linear(x[tokens], weight, ends, bias), limit, alpha), [R, N].

    tokens: int64 [R]; weight: [E, 2 N, K]; bias: [E, 2 N] or None.
    """
    if is_batch_invariant() or _is_grouped_mm(weight, tokens):
        return swiglu(grouped_linear(x[tokens], weight, ends, bias), limit, alpha)
    if _is_narrow(weight, x, tokens):
        return swiglu(_biased(narrow_groups(x, weight, ends, tokens), ends, bias), limit, alpha)
    return streamed_groups(x, weight, ends, tokens, bias=bias, gated=True, limit=limit, alpha=alpha)


def _biased(rows: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Add their group's bias to sorted rows [R, N]."""
    if bias is None:
        return rows
    row = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    return rows + bias[torch.searchsorted(ends[:-1], row, right=True)]


def _is_narrow(weight: Weight, x: torch.Tensor, rows: torch.Tensor) -> TypeGuard[Fp8Weight]:
    """Whether so many rows, of x, are multiplied by an 8-bit weight that they are rounded to 8 bits too."""
    many = rows.shape[0] > MAX_WIDE_SORTED_ROWS
    return many and isinstance(weight, Fp8Weight) and multiplies_narrow_rows(x, weight.values)


def _is_grouped_mm(weight: Weight, rows: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Whether torch's kernel is usable and faster. On other GPUs it reads `ends` on the host; it loads 16 bytes."""
    if isinstance(weight, Fp8Weight):
        return False
    aligned = weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0
    known = hasattr(F, "grouped_mm") or hasattr(torch, "_grouped_mm")
    if not (known and aligned and rows.is_cuda and weight.dtype == torch.bfloat16):
        return False
    many = rows.shape[0] > MAX_STREAMED_ROWS or torch.is_grad_enabled()
    return many and torch.cuda.get_device_capability(rows.device)[0] in (9, 10)


def _grouped_mm(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    # Public since torch 2.10; before, only the private operator exists.
    multiply = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm
    out: torch.Tensor = multiply(rows, weight.mT, offs=ends)
    return out


class Embedding(nn.Embedding):
    """torch's Embedding, without initialisation on the meta device: there it would import torch's compiler, and a
    checkpoint replaces the weights anyway."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class ScaledEmbedding(Embedding):
    """An embedding that returns its rows times a factor. Others who read its weight scale it themselves, or do not."""

    def __init__(self, rows: int, dims: int, scale: float) -> None:
        super().__init__(rows, dims)
        self.scale = scale

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return [T, dims] for token_ids int64 [T]."""
        return super().forward(token_ids) * self.scale
