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


def test_select_takes_first_that_serves():
    selection = select(SERVED_BY_TRITON, CPU)
    assert (selection.backend.name, selection.rejected) == ("triton_paged", {})


@pytest.mark.parametrize("preferred", [None, ["triton_paged", "torch_reference"]])
def test_select_keeps_every_rejection_with_reasons(preferred):
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
def test_select_never_leaves_stated_preference(broken, spec, preferred, error, words):
    with pytest.raises(error, match=words):
        select(spec, CPU, preferred)


def test_select_passes_over_broken_preference(broken):
    selection = select(SERVED_BY_TRITON, CPU, [broken, "torch_reference"])
    assert selection.backend.name == "torch_reference"
    reason = "backend 'broken' cannot be loaded: a_package_that_is_not_here is not installed"
    assert selection.rejected[broken].reasons == (reason,)


def test_registered_backend_is_used_only_by_name():
    class Eager(TorchReference):
        name = "eager"

    register(Eager)
    try:
        assert select(SERVED_BY_TRITON, CPU).backend.name == "triton_paged"
        assert select(SERVED_BY_TRITON, CPU, ["eager"]).backend.name == "eager"
    finally:
        unregister("eager")
