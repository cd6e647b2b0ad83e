"""What is registered with SGLang, over stand-ins for its modules; another SGLang gets a reason, not a backend."""

import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace

import pytest

from attn_backends.engines import sglang as plug_in
from attn_backends.engines.sglang import version
from attn_backends.engines.sglang.version import UnsupportedSglang, require_supported

NAME = "attn_backends_triton_paged"


class Factory:
    def _create_backend(self, backend_name, backend_map, error_template, stamps_children=False):
        return backend_map


def install(monkeypatch, release="0.5.23", factory=Factory):
    """An SGLang of this version; returns what a plug-in registers with it."""
    registered = SimpleNamespace(choices=[], draft_choices=[], hooks=[], backends={"triton": "made", "fa3": "made too"})
    modules = {
        "sglang.srt.speculative.draft_utils": {"DraftBackendFactory": factory},
        "sglang.srt.arg_groups.choices": {
            "add_attention_backend_choices": registered.choices.extend,
            "add_draft_attention_backend_choices": registered.draft_choices.extend,
        },
        "sglang.srt.layers.attention.attention_registry": {"ATTENTION_BACKENDS": registered.backends},
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": SimpleNamespace(register=lambda *hook: registered.hooks.append(hook)),
            "HookType": SimpleNamespace(AROUND="around"),
        },
    }
    for name, names in modules.items():
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(version.metadata, "version", lambda name: release)
    return registered


def test_register_adds_names_and_one_hook(monkeypatch):
    registered = install(monkeypatch)
    plug_in.register()
    assert registered.choices == registered.draft_choices == list(plug_in.NAMES)
    assert registered.backends[NAME] == "made" and registered.backends["attn_backends_flash_attn3"] == "made too"
    assert registered.hooks == [(plug_in.LOOK_UP, plug_in.look_up, "around")]


@pytest.mark.parametrize("release", ["0.5.22", "0.5.24", "0.6.0", "0.5.23.post1"])
def test_other_sglang_release_is_warned_and_unregistered(monkeypatch, release, capsys):
    registered = install(monkeypatch, release)
    plug_in.register()
    assert f"are for SGLang 0.5.23, got {release}" in capsys.readouterr().err
    assert not (registered.choices or registered.hooks or NAME in registered.backends)
    with pytest.raises(UnsupportedSglang, match=r"Install sglang==0\.5\.23"):
        require_supported()


def test_missing_sglang_is_the_reason(monkeypatch):
    def version_of(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(version.metadata, "version", version_of)
    assert "got none" in version.unsupported_reason()


def test_method_with_other_parameters_is_not_hooked(monkeypatch, capsys):
    class Patched:
        def _create_backend(self, backend_name, backend_map):
            return backend_map

    registered = install(monkeypatch, factory=Patched)
    plug_in.register()
    warning = capsys.readouterr().err
    assert "got self, backend_name, backend_map, so no backend was registered" in warning and not registered.hooks


def test_look_up_keeps_its_arguments_and_adds_ours():
    def original(*arguments, **options):
        return arguments, options

    theirs = {"triton": lambda: ("triton", "theirs"), "aiter": lambda: ("aiter", "theirs")}
    (factory, setting, backends, error), options = plug_in.look_up(
        original, "factory", "decode_attention_backend", theirs, "not {backend_type}", stamps_children=True
    )
    assert (factory, setting, error) == ("factory", "decode_attention_backend", "not {backend_type}")
    assert options == {"stamps_children": True} and backends.keys() == {*theirs, NAME}
    assert backends["triton"] is theirs["triton"]


def test_prefill_backend_stays_sglangs():
    theirs = {"triton": lambda: ("triton", "theirs")}

    def original(factory, setting, backends, error, **options):
        return backends

    backends = plug_in.look_up(original, None, "prefill", theirs, "")
    assert backends[NAME]() == ("triton", "theirs")
