"""The ops around a mixture's matrices on the CPU: the torch implementations, and what they reject."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders.errors import BatchError
from spec_decode.models.kernels.combine_experts import combine_experts
from spec_decode.models.kernels.order_by_expert import order_by_expert
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


@pytest.mark.parametrize(("experts", "routing"), ROUTINGS.values(), ids=ROUTINGS)
def test_tokens_take_best_experts_of_best_groups(experts, routing):
    assert_routed(noise(9, experts), noise(experts, seed=1) / 2, **routing)
    assert_routed(noise(9, experts), noise(experts, seed=1) / 2, noise(experts, seed=2), **routing)


def test_ties_take_the_first_experts():
    _, experts = route(torch.zeros(2, 64), torch.zeros(64), groups=8, top_groups=2, top_k=10)
    assert experts.tolist() == [list(range(10))] * 2


def test_nan_token_takes_valid_experts():
    _, experts = route(torch.full((1, 12), torch.nan), torch.zeros(12), groups=4, top_groups=2)
    assert set(experts[0].tolist()) <= set(range(12))


@pytest.mark.parametrize(("experts", "count"), ORDERS.values(), ids=ORDERS)
def test_rows_are_ordered_by_expert_then_token(experts, count):
    assert_ordered(order_by_expert(torch.tensor(experts), count), experts, count)


@given(st.data())
def test_any_choices_are_ordered(data):
    count, top_k = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    choices = st.lists(st.integers(0, count - 1), min_size=top_k, max_size=top_k)
    experts = data.draw(st.lists(choices, min_size=1, max_size=12))
    assert_ordered(order_by_expert(torch.tensor(experts), count), experts, count)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expert_outputs_are_summed_and_rounded_once(dtype, shared):
    inputs = combine_inputs(5, 3, 70, dtype, shared=shared)
    assert torch.equal(combine_experts(*inputs), combined(*inputs))


REFUSED = {
    "logits must be torch.float32": lambda: route(noise(2, 8).half(), torch.zeros(8)),
    "logit_bias must be torch.float32 [8]": lambda: route(noise(2, 8), torch.zeros(8), torch.zeros(8).half()),
    "bias must be torch.float32 [8]": lambda: route(noise(2, 8), torch.zeros(7)),
    "experts must be torch.int64": lambda: order_by_expert(torch.zeros(2, 3, dtype=torch.int32), 4),
    "got 0 of 4": lambda: order_by_expert(torch.zeros(2, 0, dtype=torch.int64), 4),
    "weights must be torch.float32": lambda: combine(weights=torch.ones(2, 3).half()),
    "places must be torch.int64 [2, 3]": lambda: combine(places=torch.zeros(3, 2, dtype=torch.int64)),
    "rows must be torch.float32 [6, None]": lambda: combine(rows=torch.ones(5, 4)),
    "rows must have a floating dtype": lambda: combine(rows=torch.ones(6, 4, dtype=torch.int32)),
    "shared must be torch.float32 [2, 4]": lambda: combine(shared=torch.ones(2, 4).half()),
}


def combine(**changes):
    rows, weights, places, shared = combine_inputs(2, 3, 4, torch.float32, shared=True)
    return combine_experts(**{"rows": rows, "weights": weights, "places": places, "shared": shared, **changes})


@pytest.mark.parametrize(("message", "call"), REFUSED.items(), ids=REFUSED)
def test_misfit_tensors_are_rejected(message, call):
    with pytest.raises(BatchError) as refusal:
        call()
    assert message in str(refusal.value)
