"""Inputs of a streamed linear in each of its forms, and its result in float64."""

from __future__ import annotations

import torch

from attn_backends.kernels.linear.fp8_weight import Fp8Weight, operands
from attn_backends.kernels.linear.narrow_rows import narrow_rows
from attn_backends.kernels.linear.streamed_linear import StreamedLinear

FORMS = (
    "plain", "bias", "residual", "gated", "gated_limit", "groups", "biased_groups", "gated_groups",
    "gated_biased_groups",
)  # fmt: skip
LIMIT, ALPHA = 0.7, 1.7
GROUPS = 5


def make_arguments(form, rows, n, k, dtype=torch.float32, group_of=None):
    """rows of k inputs, n outputs; weights scaled as a trained layer's are. group_of: the group of every row, sorted,
    with groups; None: some groups have one row, some several, the first and the last none."""
    generator = torch.Generator().manual_seed(rows * 1000 + n + k)

    def draw(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    gated = form.startswith("gated")
    height, limit = n * (1 + gated), LIMIT if gated and form != "gated" else None
    if not form.endswith("groups"):
        bias = draw(n) if form == "bias" else None
        residual = draw(rows, n) if form == "residual" else None
        weight = draw(height, k, scale=k**-0.5)
        return StreamedLinear(draw(rows, k), weight, None, None, bias, residual, gated, limit)
    if group_of is None:
        group_of = sorted(1 + row % (GROUPS - 2) for row in range(rows))
    ends = (torch.tensor(group_of)[None] <= torch.arange(GROUPS)[:, None]).sum(1).int()
    tokens = torch.randint(3, (rows,), generator=generator) if gated else None
    x, weight = draw(3 if gated else rows, k), draw(GROUPS, height, k, scale=k**-0.5)
    biased = "biased" in form
    bias = draw(GROUPS, height) if biased else None
    alpha = ALPHA if gated and biased else None
    return StreamedLinear(x, weight, ends, tokens, bias, None, gated, limit, None, alpha)


def in_8_bits(arguments):
    """Return the same with an 8-bit weight. Outputs differ a hundredfold in size, so that a wrong scale shows."""
    sizes = torch.logspace(-1, 1, arguments.weight.shape[-2], dtype=torch.float64)
    weight, scale = operands(Fp8Weight.of((arguments.weight.double() * sizes[:, None]).to(arguments.weight.dtype)))
    return arguments._replace(weight=weight, scale=scale)


def exact(arguments):
    """Return the result in float64, row by row."""
    x, weight, ends, tokens, bias, residual, gated, limit, scale, alpha, round_x = arguments
    if round_x:
        values, x_scale = narrow_rows(x)
        x = values.double() * x_scale.double()[:, None]
    rows = (x if tokens is None else x[tokens]).double()
    weight = weight.double() if scale is None else weight.double() * scale.double()[..., None]
    if ends is None:
        out = torch.einsum("tk,nk->tn", rows, weight)
    else:
        starts = [0, *ends.tolist()[:-1]]
        group_of = [max(e for e, start in enumerate(starts) if start <= row) for row in range(len(rows))]
        out = torch.stack([weight[e] @ row for e, row in zip(group_of, rows, strict=True)])
        bias = None if bias is None else bias[group_of]
    if bias is not None:
        out = out + bias.double()
    if gated:
        gate, up = out.chunk(2, 1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        out = gate / (1 + (-(alpha or 1.0) * gate).exp()) * (up if alpha is None else up + 1)
    return out if residual is None else out + residual.double()


def assert_exact(found, arguments, wanted=None):
    """Allow one rounding of the result, and fp32 rounding of a sum of this many terms."""
    wanted = exact(arguments) if wanted is None else wanted
    eps = torch.finfo(arguments.x.dtype).eps + arguments.x.shape[1] * torch.finfo(torch.float32).eps
    assert found.dtype == arguments.x.dtype and found.shape == wanted.shape
    error, budget = (found.double() - wanted).abs().max(), eps * wanted.abs().max()
    assert error <= budget, f"off by {error:.3g}, allowed {budget:.3g}"
