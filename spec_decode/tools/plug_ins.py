"""Load and query other packages' backends in a subprocess first, because one can end the process that loads it.

The subprocess runs this module with the arguments FD {"names": [...]}. It reports each name before it loads it and asks
what it supports.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import torch

from attn_backends import BackendError, registry
from attn_backends.registry import PlugIn
from spec_decode.testing.process_isolation import ProcessEnded, TimeLimit, python_module, start_isolated
from spec_decode.tools.specs import GQA

_EACH = TimeLimit(60.0, "loading and querying a package")
_ALL = TimeLimit(math.inf, "all of them")
_CHILD = "spec_decode.tools.plug_ins"
_tried: dict[str, str] = {}
"""Why a plug-in was rejected, by name; empty for one that was not."""


def try_plug_ins(
    child: Sequence[str] | None = None,
    each: TimeLimit = _EACH,
    on_loading: Callable[[PlugIn], None] = lambda plug_in: None,
) -> dict[str, str]:
    """Make the registry refuse, from now on, the plug-ins that end or block the process that loads and queries them.

    Returns the reasons by name. One process loads all untried plug-ins; whenever one ends it, another process loads the
    rest, so that what this process can load has been loaded together. Without plug-ins no process is started.
    on_loading: called with each plug-in before the process loads it.
    """
    packages = {plug_in.name: plug_in.package for plug_in in registry.plug_ins()}
    loaded = [name for name in packages if registry.is_loaded(name) or registry.registered_here(name)]
    names = [name for name in packages if name not in _tried and name not in loaded]

    def tell(name: str) -> None:
        on_loading(PlugIn(name, packages[name]))

    while names and (ended := _load_isolated(names, child or python_module(_CHILD), each, tell)):
        culprits, how = ended
        for name in culprits:
            _tried[name] = (
                f"backend {name!r} of package {packages[name]} did not survive loading and querying in a subprocess: "
                f"{how}; it was not loaded here. Fix the package or uninstall it."
            )
            registry.refuse(name, _tried[name])
        names = [name for name in names if name not in culprits]
    _tried.update(dict.fromkeys(names, ""))
    return {name: _tried[name] for name in packages if _tried.get(name)}


def _load_isolated(
    names: Sequence[str], child: Sequence[str], each: TimeLimit, on_loading: Callable[[str], None]
) -> tuple[Sequence[str], str] | None:
    """Return None if a subprocess loaded all; else the plug-in at fault, or all if it named none, and how it ended."""
    at = names
    with start_isolated(child, {"names": names}) as process:
        try:
            for message in process.messages(each, _ALL):
                if "loading" not in message:
                    return None
                at = [message["loading"]]
                on_loading(at[0])
            raise ProcessEnded(f"the process ended with {process.status() or 'exit status 0'}")
        except ProcessEnded as ended:
            return at, f"{ended}{process.printed_tail()}"


def _load(writer: int, names: Sequence[str]) -> None:
    for name in names:
        _send(writer, {"loading": name})
        with suppress(BackendError):
            _query(registry.load(name))
    _send(writer, {"finished": True})


def _query(backend: Any) -> None:
    """Ask the questions of `list`. Plain failures repeat there, and are reported there."""
    for device in map(torch.device, ("cpu", "cuda")):
        for question in (backend.supports, backend.builder.advance_support):
            with suppress(Exception, SystemExit):
                question(GQA, device)


def _send(writer: int, message: dict[str, Any]) -> None:
    os.write(writer, msgspec.json.encode(message) + b"\n")


if __name__ == "__main__":
    _load(int(sys.argv[1]), msgspec.json.decode(sys.argv[2])["names"])
