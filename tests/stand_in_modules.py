"""Modules of packages that are not installed here, as far as a test needs them."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest


def install_module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> ModuleType:
    """Have a test import a module with these members by its dotted name, below empty parents."""
    parts = name.split(".")
    *_, module = modules = [ModuleType(".".join(parts[:count])) for count in range(1, len(parts) + 1)]
    vars(module).update(members)
    for each in modules:
        monkeypatch.setitem(sys.modules, each.__name__, each)
    return module
