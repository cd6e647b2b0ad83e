"""Linear layers that fuse: the kernel for few rows, torch for many and for gradients, and the same numbers by both."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from spec_decode.models.kernels import skinny_linear as skinny
from spec_decode.models.kernels.skinny_linear import MAX_ROWS
from spec_decode.models.layers.linear import (
    EmbedLinear,
    FusingLinear,
    Linear,
    NormGateUp,
    NormLinear,
    ResidualLinear,
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


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_few_rows_take_one_kernel(kind, calls):
    make_case(kind, 2).run()
    assert len(calls) == 1


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_many_rows_take_torch(kind, calls):
    make_case(kind, MAX_ROWS + 1).run()
    assert not calls


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_need_a_gradient_take_torch(kind, calls):
    case = make_case(kind, 2)
    sum(part.sum() for part in case.run()).backward()
    assert not calls and case.layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("options", [{"bias": True}, {"fuse": False}, {"largest": 1 << 40}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_layer_with_a_bias_or_forbidden_to_fuse_or_beside_a_large_one_takes_torch(kind, options, calls):
    case = make_case(kind, 3 if "largest" in options else 1, **options)
    case.run()
    assert not calls


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_both_ways_give_the_same(kind):
    fused, plain = make_case(kind, 2).run(), make_case(kind, 2, fuse=False).run()
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
