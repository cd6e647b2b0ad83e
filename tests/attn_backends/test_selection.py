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


@pytest.mark.parametrize("preferred", [None, ["triton_paged", "torch_reference"]])
def test_every_rejection_on_the_way_is_kept_with_its_reasons(preferred):
    selection = select(NOT_SERVED_BY_TRITON, CPU, preferred)
    assert selection.backend.name == "torch_reference"
    assert "head_dim must be 64 to 256" in selection.rejected["triton_paged"].reasons[0]
    assert preferred is None or list(selection.rejected) == ["triton_paged"]


@pytest.mark.parametrize(
    ("spec", "preferred", "error", "words"),
    [
        (SERVED_BY_TRITON, ["triton_mla"], NoBackend, "serves only specs with value_dim"),
        (NOT_SERVED_BY_TRITON, ["triton_paged"], NoBackend, "triton_paged: head_dim must be"),
        (make_spec(dtype=torch.float64), None, NoBackend, r"triton_paged: dtype.*torch_reference: dtype"),
        (SERVED_BY_TRITON, "triton_paged", UnknownBackend, r"a list of backend names, got 'triton_paged'\. Pass \['tr"),
        (SERVED_BY_TRITON, ["nobody"], UnknownBackend, "got 'nobody'"),
        (SERVED_BY_TRITON, ["broken"], NoBackend, "is not installed"),
    ],
)
def test_a_preference_is_never_left_for_another_backend_and_every_reason_is_told(broken, spec, preferred, error, words):
    with pytest.raises(error, match=words):
        select(spec, CPU, preferred)


def test_a_broken_preference_is_passed_over_for_the_next(broken):
    selection = select(SERVED_BY_TRITON, CPU, [broken, "torch_reference"])
    assert selection.backend.name == "torch_reference"
    told = "backend 'broken' cannot be loaded: a_package_that_is_not_here is not installed"
    assert selection.rejected[broken].reasons == (told,)


def test_a_registered_backend_is_used_only_when_asked_for():
    class Eager(TorchReference):
        name = "eager"

    register(Eager)
    try:
        assert select(SERVED_BY_TRITON, CPU).backend.name == "triton_paged"
        assert select(SERVED_BY_TRITON, CPU, ["eager"]).backend.name == "eager"
    finally:
        unregister("eager")
