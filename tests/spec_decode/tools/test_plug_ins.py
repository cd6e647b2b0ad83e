"""Plug-ins are first loaded in a separate process; those that end or block it are rejected by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from attn_backends import BrokenBackend, get, registry
from attn_backends.registry import PlugIn
from attn_backends.torch_reference import TorchReference
from spec_decode.testing.process_isolation import TimeLimit
from spec_decode.tools import plug_ins
from spec_decode.tools.plug_ins import try_plug_ins
from tests.factories import register_as
from tests.hanging import UNLIMITED

LOADER = """
import json, os, signal, sys, threading
fd, names = int(sys.argv[1]), json.loads(sys.argv[2])["names"]
open({log!r}, "a").write(" ".join(names) + "\\n")
def say(**message): os.write(fd, json.dumps(message).encode() + b"\\n")
for name in names:
    say(loading=name)
    if name.startswith("crash"):
        print("no driver", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if name.startswith("hang"):
        threading.Event().wait()
    if name.startswith("quit"):
        os._exit(0)
say(finished=True)
"""


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes other packages declare backends of these names."""
    for module, state in ((registry, "_registered"), (registry, "_loaded"), (registry, "_refused")):
        monkeypatch.setattr(module, state, dict(getattr(module, state)))
    monkeypatch.setattr(plug_ins, "_tried", {})

    def declare(*names: str) -> None:
        points = [EntryPoint(n, "attn_backends.torch_reference:TorchReference", "attn_backends") for n in names]
        monkeypatch.setattr(registry, "entry_points", lambda group: points)

    return declare


TryDeclared = Callable[..., tuple[dict[str, str], list[list[str]]]]


@pytest.fixture
def try_declared(tmp_path: Path) -> TryDeclared:
    """What is refused, and which names each process was given."""
    log = tmp_path / "log"
    log.touch()

    def try_declared(
        seconds: float = UNLIMITED, on_loading: Callable[[PlugIn], None] = lambda plug_in: None
    ) -> tuple[dict[str, str], list[list[str]]]:
        child = (sys.executable, "-c", LOADER.format(log=str(log)))
        refused = try_plug_ins(child, TimeLimit(seconds, "loading and querying a package"), on_loading)
        return refused, [line.split() for line in log.read_text().splitlines()]

    return try_declared


@pytest.mark.parametrize(
    ("names", "processes"),
    [
        ("", []),
        ("a b c", ["a b c"]),
        ("a crash1 b crash2 c", ["a crash1 b crash2 c", "a b crash2 c", "a b c"]),
    ],
)
def test_remaining_plug_ins_load_together_after_each_crash(
    names: str, processes: list[str], declare: Callable[..., None], try_declared: TryDeclared
) -> None:
    declare(*names.split())
    refused, started = try_declared()
    assert list(refused) == [name for name in names.split() if name.startswith("crash")]
    assert [" ".join(given) for given in started] == processes


def test_crashing_plug_in_is_refused_with_signal(declare: Callable[..., None], try_declared: TryDeclared) -> None:
    declare("crash")
    refused, _ = try_declared()
    assert "the process ended with SIGSEGV; it printed: no driver; it was not loaded here" in refused["crash"]
    with pytest.raises(BrokenBackend) as error:
        get("crash")
    assert str(error.value) == refused["crash"]


def test_hanging_plug_in_is_refused_with_limit(declare: Callable[..., None], try_declared: TryDeclared) -> None:
    declare("a", "hang", "b")
    notes: list[str] = []
    refused, _ = try_declared(0.3, lambda plug_in: notes.append(f"{plug_in.name} of {plug_in.package}"))
    assert "exceeded the limit of 0.3 s for loading and querying a package" in refused["hang"]
    assert notes == [f"{name} of unknown" for name in ("a", "hang", "a", "b")]


def test_plug_in_exiting_cleanly_is_refused_too(declare: Callable[..., None], try_declared: TryDeclared) -> None:
    declare("quit", "a")
    assert "ended with exit status 0" in try_declared()[0]["quit"]


def test_silent_process_refuses_all_plug_ins(declare: Callable[..., None]) -> None:
    declare("a", "b")
    refused = try_plug_ins((sys.executable, "-c", "raise SystemExit('no module')"))
    assert refused.keys() == {"a", "b"} and "exit status 1; it printed: no module" in refused["a"]


def test_refusal_is_kept_until_a_call_registers_the_name(
    declare: Callable[..., None], try_declared: TryDeclared
) -> None:
    declare("a", "crash")
    first, _ = try_declared()
    again, processes = try_declared()
    assert again == first and len(processes) == 2
    register_as("crash", TorchReference, replace=True)
    assert type(get("crash")) is TorchReference


def test_loaded_or_registered_plug_in_is_not_started(declare: Callable[..., None], try_declared: TryDeclared) -> None:
    declare("here", "by_call", "new")
    get("here")
    register_as("by_call", TorchReference, replace=True)
    assert try_declared() == ({}, [["new"]])
