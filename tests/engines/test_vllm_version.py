"""The version probe at vLLM's import: its minor and its hooks, over stand-ins for its modules."""

import sys
from dataclasses import dataclass
from types import ModuleType

import pytest

from attn_backends.engines.vllm import version
from attn_backends.engines.vllm.version import UnsupportedVllm, require_supported


@dataclass
class Batch:
    num_reqs: int = 0


def install(monkeypatch, found, without=""):
    """A vLLM of this version that has every hook but one."""
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    sys.modules["vllm"].__version__ = found
    for path in version._HOOKS:
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


@pytest.mark.parametrize("found", ["0.33.0", "0.33.1", "0.33.0+cu130"])
def test_the_minor_it_was_written_for_is_taken(monkeypatch, found):
    install(monkeypatch, found)
    require_supported()


@pytest.mark.parametrize("found", ["0.32.2", "0.34.0", "0.3.3", "1.33.0", "dev"])
def test_another_version_is_refused_with_both(monkeypatch, found):
    install(monkeypatch, found)
    with pytest.raises(UnsupportedVllm, match=f"are for vLLM 0.33, got {found}; .* Install vllm==0.33"):
        require_supported()


@pytest.mark.parametrize("hook", version._HOOKS)
def test_a_hook_that_is_missing_is_named(monkeypatch, hook):
    install(monkeypatch, "0.33.0", without=hook)
    with pytest.raises(UnsupportedVllm, match=hook):
        require_supported()


def test_the_refusal_is_an_import_error_which_vllm_shows_as_the_reason():
    assert issubclass(UnsupportedVllm, ImportError)
