"""Backends of this project loaded over stand-ins for their kernels' packages, and forgotten afterwards."""

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
    """A function of tensors on the CPU as an op, which a graph records as one."""

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.define(name, torch.library.infer_schema(function, mutates_args=mutates))
        torch.library.impl(name, "cpu", function)
        namespace, _, op = name.partition("::")
        return getattr(getattr(torch.ops, namespace), op).default  # type: ignore[no-any-return]

    return define


@contextmanager
def unloaded(*names: str) -> Iterator[None]:
    """These backends as nobody loaded them; what is loaded inside is forgotten."""
    paths = {each: f"attn_backends.{each}" for each in names}
    package, loaded = vars(sys.modules["attn_backends"]), dict(registry._loaded)
    taken = {path: sys.modules.pop(path, None) for path in paths.values()}
    for each in paths:
        registry._loaded.pop(each, None)
    try:
        yield
    finally:
        registry._loaded.clear()
        registry._loaded.update(loaded)
        for each, path in paths.items():
            sys.modules.pop(path, None)
            package.pop(each, None)
            if (module := taken[path]) is not None:
                sys.modules[path] = package[each] = module


@contextmanager
def loaded_over(modules: Mapping[str, ModuleType], name: str, class_name: str) -> Iterator[AttentionBackend]:
    """A backend, on the CPU, that found these modules; inside `unloaded`."""
    with pytest.MonkeyPatch.context() as patch:
        for each, module in modules.items():
            patch.setitem(sys.modules, each, module)
        base = getattr(import_module(f"attn_backends.{name}"), class_name)
        yield type(base.__name__, (base,), {"capabilities": replace(base.capabilities, devices=("cpu",))})()
