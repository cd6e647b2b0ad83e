"""Stand-ins for packages of compiled kernels, so that an engine's Python that imports them can be loaded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


class KernelPackage(ModuleType):
    """A package in which every name is a kernel that does nothing."""

    __path__: list[str] = []  # noqa: RUF012  as a package has it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Finder:
    """Finds these packages and everything below them, installed or not."""

    def __init__(self, packages: Sequence[str], kind: type[KernelPackage]) -> None:
        self._packages, self._kind = frozenset(packages), kind

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if any(name == package or name.startswith(f"{package}.") for package in self._packages):
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]  # it need not be a Loader
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._kind(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def stand_in_for(*packages: str, kind: type[KernelPackage] = KernelPackage) -> None:
    """Make importing these packages, or anything below them, return stand-ins from now on in this process."""
    sys.meta_path.insert(0, _Finder(packages, kind))
