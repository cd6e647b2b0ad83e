from importlib import import_module

import pytest
import torch

from attn_backends import NoBackend, UnknownBackend, register, select, unregister
from attn_backends.torch_reference import TorchReference
from tests.factories import CPU, make_spec, register_as

SERVED_BY_TRITON = make_spec(head_dim=64)
NOT_SERVED_BY_TRITON = make_spec(head_dim=16)


@pytest.fixture
def broken():
    register_as("broken", lambda: import_module("a_package_that_is_not_here"))
    yield "broken"
    unregister("broken")


def test_the_first_of_the_default_order_that_serves_is_chosen():
    selection = select(SERVED_BY_TRITON, CPU)
    assert (selection.backend.name, selection.rejected) == ("triton_paged", {})


def test_a_backend_made_for_a_feature_says_that_it_serves_nothing_else():
    with pytest.raises(NoBackend, match="serves only specs with value_dim"):
        select(SERVED_BY_TRITON, CPU, ["triton_mla"])


def test_every_rejection_on_the_way_is_kept_with_its_reasons():
    selection = select(NOT_SERVED_BY_TRITON, CPU)
    assert selection.backend.name == "torch_reference"
    assert "head_dim must be 64 to 256" in selection.rejected["triton_paged"].reasons[0]


def test_a_preference_decides():
    assert select(SERVED_BY_TRITON, CPU, ["torch_reference"]).backend.name == "torch_reference"


def test_preferences_are_tried_in_order():
    selection = select(NOT_SERVED_BY_TRITON, CPU, ["triton_paged", "torch_reference"])
    assert selection.backend.name == "torch_reference" and list(selection.rejected) == ["triton_paged"]


def test_a_preference_is_never_left_for_another_backend():
    with pytest.raises(NoBackend, match="triton_paged: head_dim must be"):
        select(NOT_SERVED_BY_TRITON, CPU, ["triton_paged"])


def test_a_refusal_by_all_holds_each_ones_reasons():
    spec = make_spec(dtype=torch.float64)
    with pytest.raises(NoBackend, match=r"triton_paged: dtype.*torch_reference: dtype"):
        select(spec, CPU)


def test_an_unknown_preference_is_unknown():
    with pytest.raises(UnknownBackend, match="got 'nobody'"):
        select(SERVED_BY_TRITON, CPU, ["nobody"])


def test_a_broken_preference_is_passed_over_for_the_next(broken):
    selection = select(SERVED_BY_TRITON, CPU, [broken, "torch_reference"])
    assert selection.backend.name == "torch_reference"
    told = "backend 'broken' cannot be loaded: a_package_that_is_not_here is not installed"
    assert selection.rejected[broken].reasons == (told,)


def test_a_broken_preference_alone_is_refused_with_the_reason(broken):
    with pytest.raises(NoBackend, match="is not installed"):
        select(SERVED_BY_TRITON, CPU, [broken])


def test_a_registered_backend_is_used_only_when_asked_for():
    class Eager(TorchReference):
        name = "eager"

    register(Eager)
    try:
        assert select(SERVED_BY_TRITON, CPU).backend.name == "triton_paged"
        assert select(SERVED_BY_TRITON, CPU, ["eager"]).backend.name == "eager"
    finally:
        unregister("eager")
