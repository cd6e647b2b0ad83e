"""Load this project's backends over stand-ins for their kernel packages, and forget them afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch

from attn_backends import AttentionBackend, registry


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
    backend: AttentionBackend = type(base.__name__, (base,), {"capabilities": capabilities})()
    return backend


@contextmanager
def loaded_over(modules: Mapping[str, ModuleType], path: str, class_name: str) -> Iterator[AttentionBackend]:
    """Yield that module's backend, on the CPU, imported over these modules; nothing stays loaded."""
    with unloaded(path), pytest.MonkeyPatch.context() as patch:
        for each, module in modules.items():
            patch.setitem(sys.modules, each, module)
        yield on_the_cpu(getattr(import_module(path), class_name))
