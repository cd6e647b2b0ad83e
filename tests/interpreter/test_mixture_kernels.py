"""The kernels around a mixture's matrices, compared with oracles that take one token, row or expert at once."""

import pytest
import torch

from spec_decode.models.kernels import order_by_expert as ordering
from spec_decode.models.kernels import route_tokens as routes
from spec_decode.models.kernels.order_by_expert import order_by_expert
from tests.spec_decode.models.kernels.mixture_oracle import (
    assert_ordered,
    assert_routed,
    noise,
    route,
)


@pytest.mark.parametrize("routing", [{}, {"groups": 4, "top_groups": 2}, {"scoring": "softmax"}])
def test_nan_token_routes_to_valid_experts_alone(routing):
    logits, bias = noise(3, 12), noise(12, seed=1)
    clean, wanted = route(logits, bias, **routing)
    logits[1] = torch.nan
    weights, experts = route(logits, bias, **routing)
    assert len(set(experts[1].tolist()) & set(range(12))) == 3 and weights[1].isnan().all()
    assert torch.equal(experts[::2], wanted[::2]) and torch.equal(weights[::2], clean[::2])


def test_too_many_experts_are_routed_by_torch(monkeypatch):
    monkeypatch.setattr(routes, "MAX_EXPERTS", 15)
    monkeypatch.setattr(routes, "_route_kernel", None)
    assert_routed(noise(2, 9), noise(9, seed=1))


def test_invalid_experts_leave_row_order_valid():
    tokens, places, _ = order_by_expert(torch.tensor([[2**40, 1], [-(2**40), 7]]), 4)
    assert sorted(places.flatten().tolist()) == [0, 1, 2, 3] and tokens.tolist() == [1, 0, 1, 0]


def test_too_many_rows_are_sorted_by_torch(monkeypatch):
    monkeypatch.setattr(ordering, "MAX_ROWS", 3)
    monkeypatch.setattr(ordering, "_order_kernel", None)
    assert_ordered(order_by_expert(torch.tensor([[2, 0], [0, 1]]), 3), [[2, 0], [0, 1]], 3)
