"""Kernel packages on disk: modules with the entry points' signatures, and no kernels."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from attn_backends import fa3_providers

Install = Callable[[str, str], None]


@contextmanager
def packages_on_disk(folder: Path, *names: str) -> Iterator[Install]:
    """Hide these packages except for what install(module, source) adds, with the packages around it."""

    def ours() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] in names]

    def install(module: str, source: str) -> None:
        path = folder / f"{module.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        for package in [*path.relative_to(folder).parents][:-1]:
            (folder / package / "__init__.py").touch()
        path.write_text(source)
        sys.modules.pop(module.partition(".")[0], None)
        importlib.invalidate_caches()

    before = {name: sys.modules.pop(name) for name in ours()}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(sys, "dont_write_bytecode", True)
        sys.modules.update(dict.fromkeys(names))
        yield install
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)


@contextmanager
def versions(known: dict[str, str]) -> Iterator[None]:
    """Give metadata to distributions of these versions only."""

    def version_of(package: str) -> str:
        if package not in known:
            raise fa3_providers.PackageNotFoundError(package)
        return known[package]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fa3_providers, "version_of", version_of)
        yield
