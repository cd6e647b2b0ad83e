"""Where vLLM's names are looked up: by its minor, over stand-ins for its modules."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from attn_backends.engines.vllm import compat
from attn_backends.engines.vllm.compat import UnsupportedVllm, v0_33

PLACE = v0_33.PLACES["AttentionBackend"]


@pytest.fixture(autouse=True)
def unseen():
    """No version was looked at before, nor after."""
    compat._installed.cache_clear()
    yield
    compat._installed.cache_clear()


def install(monkeypatch, release, paths=(*v0_33.HOOKS, PLACE), without=""):
    """A vLLM of this version that has these names but one."""
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    sys.modules["vllm"].__version__ = release
    for path in paths:
        module, _, names = path.partition(":")
        here = sys.modules.get(module)
        if here is None or not hasattr(here, "stands_in"):
            here = ModuleType(module)
            here.stands_in = True
            monkeypatch.setitem(sys.modules, module, here)
        if path == without:
            continue
        for name in names.split("."):
            if not hasattr(here, name):
                setattr(here, name, type(name, (), {}))
            here = getattr(here, name)


@pytest.mark.parametrize("release", ["0.33.0", "0.33.1", "0.33.0+cu130"])
def test_a_supported_minor_gives_its_names(monkeypatch, release):
    install(monkeypatch, release)
    assert compat.AttentionBackend is sys.modules["vllm.v1.attention.backend"].AttentionBackend


@pytest.mark.parametrize("release", ["0.32.2", "0.34.0", "0.3.3", "1.33.0", "dev"])
def test_another_minor_is_refused_with_both(monkeypatch, release):
    install(monkeypatch, release)
    with pytest.raises(UnsupportedVllm, match=f"are for vLLM 0.33, got {release}; .* Install vllm==0.33"):
        _ = compat.AttentionBackend


@pytest.mark.parametrize("path", v0_33.HOOKS)
def test_a_missing_hook_is_named(monkeypatch, path):
    install(monkeypatch, "0.33.0", without=path)
    with pytest.raises(UnsupportedVllm, match=path):
        _ = compat.AttentionBackend


def test_a_missing_name_is_named_with_its_place(monkeypatch):
    install(monkeypatch, "0.33.0", [*v0_33.HOOKS, "vllm.logger:other"])
    with pytest.raises(UnsupportedVllm, match=r"this 0\.33\.0 lacks vllm\.logger:init_logger"):
        _ = compat.init_logger


def test_a_name_that_no_vllm_has_imports_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert not hasattr(compat, "pytestmark")


def test_a_second_minor_needs_only_its_own_module(monkeypatch):
    later = SimpleNamespace(PLACES={"AttentionBackend": "vllm.moved:Backend"}, HOOKS={})
    monkeypatch.setitem(compat.VERSIONS, "0.34", later)
    install(monkeypatch, "0.34.0", ["vllm.moved:Backend"])
    assert compat.AttentionBackend is sys.modules["vllm.moved"].Backend
    assert compat.unsupported_reason("0.33.1") == "" and compat.requirement() == "vllm==0.34.*"
    assert "for vLLM 0.33 or 0.34, got 0.35.0" in compat.unsupported_reason("0.35.0")


def test_unsupported_vllm_is_an_import_error():
    """vLLM shows an ImportError as the reason against a backend."""
    assert issubclass(UnsupportedVllm, ImportError)
