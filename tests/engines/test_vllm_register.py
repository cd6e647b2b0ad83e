"""What is registered with vLLM, over a stand-in for its registry; another vLLM gets a reason, not a backend."""

import importlib
import sys
from types import ModuleType

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import pytest

from attn_backends.engines import vllm as plug_in
from attn_backends.engines.vllm import compat
from attn_backends.engines.vllm.compat import UnsupportedVllm
from tests.import_graph import ROOT
from tests.stand_in_modules import install_module

REGISTRY = "vllm.v1.attention.backends.registry"
ADAPTERS = {path.rpartition(".")[0] for path in plug_in.NAMES.values()}


class Member:
    def __init__(self, path):
        self.path = path

    def get_path(self):
        return self.path


def registry(monkeypatch, taken=(), free_names=True):
    """vLLM's registry of names, as far as a plug-in sees it, and no registry of quantizations."""
    monkeypatch.setattr(plug_in, "_register_quantizations", lambda: None)

    class Names(type):
        def __getitem__(cls, name):
            return cls.__members__[name]

    body = {"__members__": {name: Member("another.package") for name in taken}}
    if free_names:
        body["register"] = None
    names = Names("AttentionBackendEnum", (), body)

    def register_backend(name, path):
        if name in names.__members__:
            raise ValueError(f"Backend {name} already exists")
        names.__members__[name] = Member(path)

    install_module(monkeypatch, REGISTRY, AttentionBackendEnum=names, register_backend=register_backend)
    return names.__members__


def test_every_name_is_registered_with_a_path_of_no_version(monkeypatch):
    members = registry(monkeypatch)
    plug_in.register()
    assert {name: member.path for name, member in members.items()} == plug_in.NAMES
    room = "attn_backends.engines.vllm"
    assert {f"{room}.flashinfer", f"{room}.mla", f"{room}.paged", f"{room}.sparse"} == ADAPTERS


def test_second_registration_changes_nothing_silently(monkeypatch, capsys):
    members = registry(monkeypatch)
    plug_in.register()
    before = dict(members)
    plug_in.register()
    assert members == before and not capsys.readouterr().err


def test_name_taken_by_another_plug_in_warns(monkeypatch, capsys):
    members = registry(monkeypatch, taken=["FLASHINFER_IN_GRAPH"])
    plug_in.register()
    assert members["FLASHINFER_IN_GRAPH"].path == "another.package"
    assert "FLASHINFER_IN_GRAPH is already another.package" in capsys.readouterr().err


def test_vllm_without_free_names_starts_with_warning(monkeypatch, capsys):
    members = registry(monkeypatch, free_names=False)
    plug_in.register()
    assert not members and "needs a vLLM with free backend names" in capsys.readouterr().err


def test_vllm_with_moved_registry_starts_with_warning(monkeypatch, capsys):
    registry(monkeypatch)
    monkeypatch.setitem(sys.modules, REGISTRY, None)
    plug_in.register()
    assert "needs a vLLM with free backend names" in capsys.readouterr().err


@pytest.fixture
def no_adapter(monkeypatch):
    """No adapter is loaded, and no vLLM was looked at."""
    for name in {*ADAPTERS, f"{plug_in.__name__}.backend", f"{plug_in.__name__}.batch"}:
        monkeypatch.delitem(sys.modules, name, raising=False)
    compat._installed.cache_clear()
    yield
    compat._installed.cache_clear()


def test_register_imports_no_adapter(monkeypatch, no_adapter):
    registry(monkeypatch)
    plug_in.register()
    assert not ADAPTERS & sys.modules.keys()


@pytest.mark.parametrize("module", sorted(ADAPTERS))
def test_an_adapter_in_another_minor_refuses_to_load(monkeypatch, no_adapter, module):
    vllm = ModuleType("vllm")
    vllm.__version__ = "0.34.0"
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    with pytest.raises(UnsupportedVllm, match=r"are for vLLM 0\.33, got 0\.34\.0"):
        importlib.import_module(module)


def test_package_declares_entry_point_and_vllm_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"][plug_in.ENTRY_POINT_GROUP] == {
        "attn_backends": "attn_backends.engines.vllm:register"
    }
    assert project["optional-dependencies"]["vllm"] == ["vllm>=0.33,<0.34; sys_platform == 'linux'"]
