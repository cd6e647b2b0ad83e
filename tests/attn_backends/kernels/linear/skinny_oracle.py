"""Inputs of a skinny linear in each of its forms, its result in float64, and how far an unfused model is from that."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from attn_backends.kernels.linear.fp8_weight import Fp8Weight, operands
from attn_backends.kernels.linear.skinny_linear import (
    SkinnyLinear,
    embed_linear,
    norm_linear,
    skinny_linear,
    wide_linear,
)

EPS = 1e-6
VOCAB = 11
FORMS = ("plain", "residual", "norm", "delta", "gated", "delta_gated", "embed", "wide", "wide_norm")
NARROW = [form for form in FORMS if not form.startswith("wide")]
"""Forms whose weight can have 8 bits."""


@dataclass
class Inputs:
    """One call's tensors; None if its form has none, and eps None without a norm."""

    x: torch.Tensor
    weight: torch.Tensor
    token_ids: torch.Tensor | None = None
    embedding: torch.Tensor | None = None
    delta: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    eps: float | None = None
    residual: torch.Tensor | None = None
    gated: bool = False
    wide: bool = False
    scale: torch.Tensor | None = None

    def in_8_bits(self):
        """Return the same with an 8-bit weight. Outputs differ a hundredfold in size, so that a wrong scale shows."""
        sizes = torch.logspace(-1, 1, len(self.weight), dtype=torch.float64)
        weight, scale = operands(Fp8Weight.of((self.weight.double() * sizes[:, None]).to(self.weight.dtype)))
        return replace(self, weight=weight, scale=scale)

    @property
    def wide_weight(self):
        """Return the weight in float64."""
        return self.weight.double() if self.scale is None else self.weight.double() * self.scale.double()[:, None]

    def call(self):
        """Return the result of this form's public function."""
        weight = self.weight if self.scale is None else Fp8Weight(self.weight, self.scale)
        if self.token_ids is not None:
            return embed_linear(self.token_ids, self.embedding, self.x, weight)
        if self.wide:
            return wide_linear(self.x, self.weight, norm_eps=self.eps)
        if self.norm is not None:
            return norm_linear(self.x, self.delta, self.norm, self.eps, weight, gated=self.gated)[1]
        return skinny_linear(self.x, weight, self.residual)

    def launched(self, tile):
        """Return the kernel's result with this tile."""
        return self.arguments().launch(tile)[1]

    def arguments(self):
        """Return the op's arguments."""
        return SkinnyLinear(
            self.x, self.weight, self.token_ids, self.embedding, self.delta, self.norm, self.residual, self.eps,
            self.gated, self.scale,
        )  # fmt: skip

    @property
    def dtype(self):
        """The result's dtype."""
        return self.weight.dtype if self.scale is None else self.x.dtype

    def exact(self):
        """Return the result in float64; x + delta is rounded to its dtype, like the residual stream."""
        x = self.x if self.delta is None else self.x + self.delta
        x = x.double()
        if self.token_ids is not None:
            x = torch.cat([self.embedding[self.token_ids].double(), x], 1)
        if self.eps is not None:
            x = x / (x.square().mean(1, keepdim=True) + self.eps).sqrt()
        if self.norm is not None:
            x = x * self.norm.double()
        out = torch.einsum("tk,nk->tn", x, self.wide_weight)
        if self.gated:
            gate, up = out.chunk(2, 1)
            out = gate / (1 + (-gate).exp()) * up
        return out if self.residual is None else out + self.residual.double()

    def by_parts(self):
        """Return the result of separate operations that each round to the result's dtype."""
        x = self.x if self.delta is None else self.x + self.delta
        x = x.to(self.dtype)
        if self.token_ids is not None:
            x = torch.cat([self.embedding[self.token_ids], x], 1)
        if self.eps is not None:
            x = F.rms_norm(x, x.shape[1:], self.norm, self.eps)
        out = F.linear(x, self.wide_weight.to(x.dtype))
        if self.gated:
            gate, up = out.chunk(2, 1)
            out = F.silu(gate) * up
        return out if self.residual is None else out + self.residual


def make_inputs(form, rows, n, k, dtype=torch.float32):
    """Inputs of `form` with n outputs and k inputs (k even for "embed"), weights scaled as a trained layer's are."""
    generator = torch.Generator().manual_seed(rows * 1000 + n + k)

    def draw(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    gated = form.endswith("gated")
    inputs = Inputs(x=draw(rows, k), weight=draw(n * (1 + gated), k, scale=k**-0.5), gated=gated)
    if form.startswith("wide"):
        inputs.wide, inputs.weight = True, torch.randn(n, k, generator=generator) * k**-0.5
    if form in ("norm", "delta", "wide_norm") or gated:
        inputs.eps = EPS
    if form == "residual":
        inputs.residual = draw(rows, n)
    if form in ("norm", "delta") or gated:
        inputs.norm = 1 + draw(k, scale=0.3)
    if form.startswith("delta"):
        inputs.delta = draw(rows, k)
    if form == "embed":
        inputs.x, inputs.embedding = draw(rows, k // 2), draw(VOCAB, k // 2)
        inputs.token_ids = torch.randint(VOCAB, (rows,), generator=generator)
    return inputs


def assert_within_budget(found, inputs):
    """Allow twice the error of the unfused operations, plus a rounding."""
    exact = inputs.exact()
    rounding = torch.finfo(inputs.dtype).eps * exact.abs().max()
    budget = 2 * ((inputs.by_parts().double() - exact).abs().max() + rounding)
    error = (found.double() - exact).abs().max()
    assert found.dtype == inputs.dtype and found.shape == exact.shape
    assert error <= budget, f"off by {error:.3g}, allowed {budget:.3g}"
