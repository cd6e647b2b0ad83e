"""The kernels around a mixture's matrices, against oracles that take one token, row or expert at a time."""

import pytest
import torch

from builders.kernels.triton_runtime import torch_implementations
from spec_decode.models.kernels import order_by_expert as ordering
from spec_decode.models.kernels import route_tokens as routes
from spec_decode.models.kernels.combine_experts import combine_experts
from spec_decode.models.kernels.order_by_expert import order_by_expert
from spec_decode.models.kernels.route_tokens import Routing
from spec_decode.models.layers.feed_forward import FeedForward
from spec_decode.models.layers.moe import Experts, MixtureOfExperts
from tests.amid_nan import amid_nan
from tests.spec_decode.models.kernels.mixture_oracle import (
    ORDERS,
    ROUTINGS,
    assert_ordered,
    assert_routed,
    combine_inputs,
    combined,
    noise,
    route,
)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(("experts", "routing"), ROUTINGS.values(), ids=ROUTINGS)
def test_tokens_take_the_best_experts_of_the_best_groups(experts, routing, tokens):
    assert_routed(amid_nan(noise(tokens, experts)), amid_nan(noise(experts, seed=1) / 2), **routing)


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax", "sqrtsoftplus"])
def test_scores_keep_their_digits_far_from_zero(scoring):
    logits = torch.tensor([[-40.0, -17.0, -12.0, -8.0, -5.0, 0.0, 5.0, 17.0, 40.0]])
    assert_routed(logits, torch.arange(9.0), scoring=scoring, normalised=False, top_k=9)


def test_of_equal_experts_the_first_are_taken():
    _, experts = route(torch.zeros(2, 70), torch.zeros(70), top_k=16)
    assert experts.tolist() == [list(range(16))] * 2


def test_of_equal_groups_the_first_are_taken():
    _, experts = route(torch.zeros(1, 15), torch.zeros(15), groups=5, top_groups=2, top_k=6)
    assert experts.tolist() == [list(range(6))]


@pytest.mark.parametrize("routing", [{}, {"groups": 4, "top_groups": 2}, {"scoring": "softmax"}])
def test_a_token_of_nan_takes_experts_that_exist_and_leaves_the_others_alone(routing):
    logits, bias = noise(3, 12), noise(12, seed=1)
    clean, wanted = route(logits, bias, **routing)
    logits[1] = torch.nan
    weights, experts = route(logits, bias, **routing)
    assert len(set(experts[1].tolist()) & set(range(12))) == 3 and weights[1].isnan().all()
    assert torch.equal(experts[::2], wanted[::2]) and torch.equal(weights[::2], clean[::2])


def test_experts_barred_by_their_bias_come_last():
    bias = torch.full((6,), float("-inf"))
    bias[4] = 0.0
    assert route(noise(1, 6), bias)[1].tolist() == [[4, 0, 1]]


def test_experts_too_many_for_a_program_are_routed_by_torch(monkeypatch):
    monkeypatch.setattr(routes, "MAX_EXPERTS", 15)
    monkeypatch.setattr(routes, "_route_kernel", None)
    assert_routed(noise(2, 9), noise(9, seed=1))


@pytest.mark.parametrize(("experts", "count"), ORDERS.values(), ids=ORDERS)
def test_rows_lie_by_expert_and_then_as_they_came(experts, count):
    assert_ordered(order_by_expert(torch.tensor(experts), count), experts, count)


def test_no_tokens_end_every_expert_at_0():
    tokens, places, ends = order_by_expert(torch.zeros(0, 3, dtype=torch.int64), 5)
    assert (tokens.shape, places.shape, ends.tolist()) == ((0,), (0, 3), [0] * 5)


def test_experts_that_do_not_exist_lead_no_row_astray():
    tokens, places, _ = order_by_expert(torch.tensor([[2**40, 1], [-(2**40), 7]]), 4)
    assert sorted(places.flatten().tolist()) == [0, 1, 2, 3] and tokens.tolist() == [1, 0, 1, 0]


def test_rows_too_many_to_compare_are_sorted_by_torch(monkeypatch):
    monkeypatch.setattr(ordering, "MAX_ROWS", 3)
    monkeypatch.setattr(ordering, "_order_kernel", None)
    assert_ordered(order_by_expert(torch.tensor([[2, 0], [0, 1]]), 3), [[2, 0], [0, 1]], 3)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "top_k", "width"), [(1, 4, 1), (5, 1, 70), (3, 3, 600)])
def test_what_experts_give_is_summed_up_and_rounded_once(tokens, top_k, width, dtype, shared):
    rows, weights, places, beside = combine_inputs(tokens, top_k, width, dtype, shared=shared)
    found = combine_experts(amid_nan(rows), amid_nan(weights), places, amid_nan(beside) if shared else None)
    assert torch.equal(found, combined(rows, weights, places, beside))


def test_nan_of_one_token_reaches_no_other():
    rows, weights, places, shared = combine_inputs(3, 2, 40, torch.float32, shared=True)
    clean = combine_experts(rows, weights, places, shared)
    rows[places[1]] = torch.nan
    found = combine_experts(rows, weights, places, shared)
    assert found[1].isnan().all() and torch.equal(found[::2], clean[::2])


@pytest.mark.parametrize("tokens", [1, 7])
def test_a_mixture_is_the_same_by_kernels_and_by_torch(tokens):
    feed_forward = FeedForward(noise(24, 16) / 3, noise(16, 12, seed=1) / 3, 0.5)
    experts = Experts(noise(12, 24, 16, seed=2) / 3, noise(12, 16, 12, seed=3) / 3, 0.5)
    routing = Routing(num_experts=12, top_k=3, groups=4, top_groups=2, scoring="sqrtsoftplus")
    mixture = MixtureOfExperts(routing, noise(12, 16, seed=4), noise(12, seed=5) / 2, experts, feed_forward)
    x = noise(tokens, 16, seed=6)
    with torch.no_grad():
        found = mixture(x)
        with torch_implementations():
            torch.testing.assert_close(found, mixture(x), rtol=1e-5, atol=1e-6)
