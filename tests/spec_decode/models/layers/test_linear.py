"""Fused linear layers: the kernel for few rows, torch for many and for gradients, with the same numbers."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from attn_backends.kernels.linear import skinny_linear as skinny
from attn_backends.kernels.linear import streamed_linear as streamed
from attn_backends.kernels.linear.skinny_tiling import MAX_ROWS
from attn_backends.kernels.linear.streamed_tiling import ROWS_OF_ANY_WEIGHT
from spec_decode.models.layers.linear import (
    EmbedLinear,
    FusingLinear,
    Linear,
    NormGateUp,
    NormLinear,
    ResidualLinear,
    joined,
)
from spec_decode.models.layers.rms_norm import RMSNorm

HIDDEN, OUT, VOCAB = 32, 24, 11


@dataclass
class Case:
    """A layer and its inputs."""

    layer: FusingLinear
    inputs: tuple[Any, ...]

    def run(self):
        """The whole result, however it is split into residual and delta."""
        found = self.layer(*self.inputs)
        if isinstance(self.layer, ResidualLinear):
            x, delta = found
            return (x if delta is None else x + delta,)
        return found if isinstance(found, tuple) else (found,)


def make_case(kind, rows, **options):
    torch.manual_seed(0)
    x, delta, norm = torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN), RMSNorm(HIDDEN, 1e-6)
    norm.weight.data.normal_(1, 0.3)
    if kind is Linear:
        return Case(Linear(HIDDEN, OUT, **options), (x,))
    if kind is ResidualLinear:
        return Case(ResidualLinear(HIDDEN, OUT, **options), (x, torch.randn(rows, OUT)))
    if kind is EmbedLinear:
        ids = torch.arange(rows) % VOCAB
        return Case(EmbedLinear(2 * HIDDEN, OUT, **options), (ids, torch.randn(VOCAB, HIDDEN), x))
    return Case(kind(HIDDEN, OUT, OUT, **options), (x, delta, norm))


@pytest.fixture
def calls(monkeypatch):
    def op(*arguments):
        calls.append(arguments)
        return skinny.SkinnyLinear(*arguments).reference()

    calls = []
    monkeypatch.setattr(skinny, "_skinny_linear", op)
    return calls


KINDS = [Linear, NormLinear, NormGateUp, ResidualLinear, EmbedLinear]


@pytest.mark.outside_inference_mode
@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_use_one_kernel_matching_torch(kind, calls):
    """Torch takes many rows, those that need a gradient, and a layer with a bias."""
    case = make_case(kind, 2)
    plain = case.run()
    sum(part.sum() for part in plain).backward()
    assert not calls and case.layer.weight.grad.abs().sum() > 0
    with torch.no_grad():
        torch.testing.assert_close(case.run(), plain, rtol=1e-5, atol=1e-5)
        assert len(calls) == 1
        make_case(kind, MAX_ROWS + 1).run()
        if kind is not NormGateUp:
            make_case(kind, 1, bias=True).run()
        assert len(calls) == 1


@pytest.mark.parametrize("rows", [MAX_ROWS + 1, ROWS_OF_ANY_WEIGHT])
@pytest.mark.parametrize("kind", [NormGateUp, ResidualLinear])
def test_more_rows_stream_weight_with_fused_tail(kind, rows, monkeypatch):
    def op(*arguments):
        calls.append(streamed.StreamedLinear(*arguments))
        return calls[-1].reference()

    calls = []
    monkeypatch.setattr(streamed, "_streamed_linear", op)
    case = make_case(kind, rows)
    case.layer.bfloat16()
    inputs = [each.bfloat16() for each in case.inputs]
    found = case.layer(*inputs)
    assert [(call.gated, call.residual is not None) for call in calls] == [(kind is NormGateUp, kind is ResidualLinear)]
    assert (found[1] is None) is (kind is ResidualLinear)


def make_residual(rows, inputs=600, **options):
    torch.manual_seed(0)
    layer = ResidualLinear(inputs, OUT, **options).bfloat16()
    return layer, torch.randn(rows, inputs).bfloat16(), torch.randn(rows, OUT).bfloat16()


@pytest.mark.parametrize(("rows", "num_inputs"), [(MAX_ROWS + 1, 600), (streamed.MAX_ROWS, 4096)])
def test_split_product_leaves_its_sum_to_next_norm(rows, num_inputs):
    layer, inputs, x = make_residual(rows, num_inputs)
    found, delta = layer(inputs, x)
    assert found is x and delta.dim() == 3 and delta.dtype == torch.float32
    wanted = x.double() + inputs.double() @ layer.weight.double().T
    torch.testing.assert_close(joined(x, delta).double(), wanted, rtol=2**-8, atol=1e-3)
    norm = RMSNorm(OUT, 1e-6).bfloat16()
    total, normed = norm(x, delta)
    assert torch.equal(total, joined(x, delta)) and torch.equal(normed, norm(total)[1])


@pytest.mark.parametrize("options", [{"bias": True}, {}], ids=str)
def test_product_without_shares_is_added_directly(options):
    layer, inputs, x = make_residual(5, inputs=600 if options else 32, **options)
    assert layer(inputs, x)[1] is None


def test_shares_before_fusable_layer_are_summed_by_norm(calls):
    layer, inputs, x = make_residual(MAX_ROWS + 1)
    x, delta = layer(inputs, x)
    after, norm = NormLinear(OUT, 8).bfloat16(), RMSNorm(OUT, 1e-6).bfloat16()
    found = after(x[:MAX_ROWS], delta[:, :MAX_ROWS].contiguous(), norm)
    assert [skinny.SkinnyLinear(*call).norm for call in calls] == [None]
    wanted = after(joined(x, delta)[:MAX_ROWS], None, norm)
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-2)


def test_residual_and_any_delta_are_joined():
    x, delta = torch.ones(2, 3), torch.full((2, 3), 2.0)
    assert joined(x, None) is x and joined(x, delta).eq(3).all() and joined(x, torch.stack([delta] * 2)).eq(5).all()
