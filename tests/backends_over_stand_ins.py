"""Load this project's backends over stand-ins for their kernel packages, and forget them afterwards."""

from __future__ import annotations

import glob
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch

from attn_backends import AttentionBackend, registry
from spec_decode.conformance import iter_checks
from tests.factories import CPU

KIT = ("contract.*", "builder.*", "poison.*", "graph.*", "refusal.*")
"""Every family but those of attention alone and of whole rounds."""
_TELLING = {
    "builder.advance_attends_right": "base-single window-decode deepseek_v3-decode page_4-*",
    "builder.advance_refreshes_another_batch": "base-verify window-decode deepseek_v3-decode page_64-* page_128-*",
    "graph.blocks_replay_over_other_batches": "base-* window-* mqa-* page_*",
    "graph.loop_replays_over_other_batches": "base-decode",
    "graph.replay_equals_eager": "base-few window-decode deepseek_v3-decode",
    "graph.tree_replays_over_other_trees": "base-* gqa-trees page_*-trees",
    "graph.two_sizes_interleave": "base-few",
    "numerics.attention_is_right": "base-* *-decode *-ragged",
    "numerics.blocks_see_what_is_behind": "base-* window-* *-block",
    "numerics.edges_are_right": "[!r]* rows_96",
    "numerics.trees_see_their_ancestors": "base-* *-ragged",
    "poison.*": "base-* window-decode",
}
"""Cases, by check, of which our code around a package's kernels sees that they differ: how a spec's numbers reach the
kernels shows in one batch of each kind; how a replay follows its batch, in one spec of each page size, group of heads
and window. How many rows a kernel takes is the package's to show."""


def stand_in_op(name: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of CPU tensors as an op, which a graph records as one."""

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.define(name, torch.library.infer_schema(function, mutates_args=mutates))
        torch.library.impl(name, "cpu", function)
        namespace, _, op = name.partition("::")
        return getattr(getattr(torch.ops, namespace), op).default  # type: ignore[no-any-return]

    return define


@contextmanager
def unloaded(*paths: str, package: str = "") -> Iterator[None]:
    """Unload these modules, their backends and that package for the block, then restore them."""
    before, loaded = _take_away(paths, package), dict(registry._loaded)
    for name, backend in loaded.items():
        if type(backend).__module__ in paths:
            del registry._loaded[name]
    try:
        yield
    finally:
        _take_away(paths, package)
        sys.modules.update(before)
        for path in before.keys() & set(paths):
            parent, _, child = path.rpartition(".")
            setattr(sys.modules[parent], child, before[path])
        registry._loaded.clear()
        registry._loaded.update(loaded)


def _take_away(paths: Sequence[str], package: str) -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name in paths or name.partition(".")[0] == package]
    for parent, _, child in (path.rpartition(".") for path in paths):
        vars(sys.modules[parent]).pop(child, None)
    return {name: sys.modules.pop(name) for name in names}


def on_the_cpu(base: type[AttentionBackend]) -> AttentionBackend:
    """Return a backend of this class that runs on the CPU."""
    capabilities = replace(base.capabilities, devices=("cpu",))
    made: AttentionBackend = type(base.__name__, (base,), {"capabilities": capabilities})()
    return made


@contextmanager
def loaded_over(modules: Mapping[str, ModuleType], path: str, class_name: str) -> Iterator[AttentionBackend]:
    """Yield that module's backend, on the CPU, imported over these modules; nothing stays loaded."""
    with unloaded(path), pytest.MonkeyPatch.context() as patch:
        for each, module in modules.items():
            patch.setitem(sys.modules, each, module)
        yield on_the_cpu(getattr(import_module(path), class_name))


def telling_checks(backend: AttentionBackend, *patterns: str) -> list[str]:
    """Return patterns of the checks whose name or id matches one of these, on the telling cases: never none of a
    check's."""
    found: dict[str, list[str]] = {}
    for check in iter_checks(backend, device=CPU):
        if any(fnmatch(check.id, pattern) or fnmatch(check.name, pattern) for pattern in patterns):
            found.setdefault(check.name, []).append(check.case)
    return [f"{name}[[]{glob.escape(case)}[]]" for name, cases in found.items() for case in _telling(name, cases)]


def _telling(name: str, cases: Sequence[str]) -> Sequence[str]:
    wanted = next((wanted for check, wanted in _TELLING.items() if fnmatch(name, check)), "*").split()
    return [case for case in cases if any(fnmatch(case, each) for each in wanted)] or cases
