"""A mixture of experts outside whole drafts: the weights it reads, its parts, and products by group."""

import pytest
import torch

from attn_backends.kernels.linear.batch_invariance import batch_invariance
from attn_backends.kernels.linear.swiglu import swiglu
from spec_decode.models.kernels.route_tokens import Routing, route_tokens
from spec_decode.models.layers import linear as products
from spec_decode.models.layers.feed_forward import FeedForward
from spec_decode.models.layers.moe import Experts, MixtureOfExperts

HIDDEN, INNER, COUNT, TOP_K = 16, 12, 8, 3


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def module():
    experts = Experts(noise(COUNT, 2 * INNER, HIDDEN) / 3, noise(COUNT, HIDDEN, INNER, seed=1) / 3, 0.3)
    shared = FeedForward(noise(2 * INNER, HIDDEN, seed=2) / 3, noise(HIDDEN, INNER, seed=3) / 3, 0.3)
    routing = Routing(num_experts=COUNT, top_k=TOP_K, scale=1.5)
    return MixtureOfExperts(routing, noise(COUNT, HIDDEN, seed=4), noise(COUNT, seed=5) / 2, experts, shared)


def test_mixture_without_shared_expert_is_routed_part(module):
    x, residual = noise(5, HIDDEN), noise(5, HIDDEN, seed=7)
    with_shared, shared = module(x), module.shared(x)
    module.shared = None
    torch.testing.assert_close(module(x), with_shared - shared)
    torch.testing.assert_close(module(x, residual), with_shared - shared + residual)


@pytest.mark.parametrize("tokens", [9, 40])
def test_token_does_not_depend_on_its_neighbours(module, tokens):
    x = noise(tokens, HIDDEN)
    spoilt = x.clone()
    spoilt[4] = torch.nan
    others = [row for row in range(tokens) if row != 4]
    assert torch.equal(module(spoilt)[others], module(x)[others])


def test_single_token_reads_only_its_experts(module):
    x = noise(1, HIDDEN)
    _, chosen = route_tokens(x @ module.router.T, module.bias, module.routing)
    wanted = module(x)
    others = [expert for expert in range(COUNT) if expert not in chosen[0]]
    assert len(others) == COUNT - TOP_K
    module.experts.gate_up[others] = module.experts.down[others] = torch.nan
    assert torch.equal(module(x), wanted)


ROUTING_PROBLEMS = {
    "sigmoid, softmax, sqrtsoftplus, got 'relu'": {"scoring": "relu"},
    "8 experts in 3 groups": {"groups": 3},
    "in 4 groups and top_groups 5": {"groups": 4, "top_groups": 5},
    "top_k must be 1 to 4, .*, got 5": {"groups": 4, "top_groups": 2, "top_k": 5},
    "got 0": {"top_k": 0},
}


@pytest.mark.parametrize(("message", "changes"), ROUTING_PROBLEMS.items(), ids=ROUTING_PROBLEMS)
def test_invalid_routing_is_rejected(message, changes):
    with pytest.raises(ValueError, match=message):
        Routing(**{"num_experts": 8, "top_k": 2, **changes})


GROUPS = pytest.mark.parametrize("ends", [[0, 3, 3, 7], [0, 0, 7, 7], [7, 7, 7, 7], [1, 2, 3, 7]], ids=str)


def plain_products(rows, weight, ends, bias=None):
    starts, bias = [0, *ends[:-1]], [0.0] * len(ends) if bias is None else bias
    groups = enumerate(zip(starts, ends, strict=True))
    return torch.cat([rows[a:b] @ weight[group].T + bias[group] for group, (a, b) in groups])


@pytest.mark.parametrize("path", ["streamed", "grouped_mm", "batch_invariant"])
@GROUPS
def test_rows_use_bias_of_their_group(ends, path, monkeypatch):
    monkeypatch.setattr(products, "_is_grouped_mm", lambda weight, rows: path == "grouped_mm")
    monkeypatch.setattr(products, "_grouped_mm", lambda rows, weight, _: plain_products(rows, weight, ends))
    rows, weight, bias, ends_of = noise(7, 8), noise(4, 16, 8, seed=1), noise(4, 16, seed=2), torch.tensor(ends).int()
    wanted = plain_products(rows, weight, ends, bias)
    with batch_invariance(path == "batch_invariant"):
        found = products.grouped_linear(rows, weight, ends_of, bias)
        gated = products.grouped_gated_linear(rows, torch.arange(7), weight, ends_of, 0.5, bias=bias, alpha=1.7)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    gate, up = wanted.chunk(2, -1)
    gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
    torch.testing.assert_close(gated, gate * torch.sigmoid(1.7 * gate) * (up + 1), rtol=1e-5, atol=1e-5)


@GROUPS
def test_rows_use_matrix_of_their_group(ends):
    rows, weight, ends_of = noise(7, 8), noise(4, 16, 8, seed=1), torch.tensor(ends, dtype=torch.int32)
    wanted = plain_products(rows, weight, ends)
    torch.testing.assert_close(products.grouped_linear(rows, weight, ends_of), wanted, rtol=1e-5, atol=1e-5)
    x, tokens = noise(3, 8), torch.tensor([2, 0, 0, 1, 2, 1, 0])
    for limit in (None, 0.5):
        found = products.grouped_gated_linear(x, tokens, weight, ends_of, limit)
        wanted = swiglu(plain_products(x[tokens], weight, ends), limit)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="needs torch 2.10, for the CPU")
@GROUPS
def test_grouped_mm_matches_plain_products(ends):
    rows, weight = noise(7, 8).bfloat16(), noise(4, 16, 8, seed=1).bfloat16()
    found = products._grouped_mm(rows, weight, torch.tensor(ends, dtype=torch.int32))
    torch.testing.assert_close(found, plain_products(rows, weight, ends), rtol=2e-2, atol=2e-2)
