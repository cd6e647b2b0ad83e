"""Which of our modules uses which: as their sources say, and as they hold one another after loading.

`python -m tests.import_graph MODULE...` loads those, then all of them, and prints as JSON what had come with those, and
the uses of the second kind.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
FLOORS = ["builders", "attn_backends", "spec_decode", "engines", "benchmarks"]
"""From the ground up."""

parsed = cache(ast.parse)
"""Of a source. A tree is walked by several tests."""
Uses = dict[str, set[str]]
"""For each module, the modules it uses. A package's own file is called package.__init__."""


def module_files(root: Path = ROOT, floors: Iterable[str] = FLOORS) -> dict[str, Path]:
    """Every module of the floors with its file."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts): path
        for floor in floors
        for path in sorted((root / floor).rglob("*.py"))
    }


def imported(source: str, module: str = "", known: Collection[str] = ()) -> set[str]:
    """What a module imports, wherever in it: inside functions and for types alone, too.

    `from package import name` counts as package.name where that is a known module, and as package where it is not.
    """
    found = set()
    for node in _import_statements(source):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            origin = "." * node.level + (node.module or "")
            origin = importlib.util.resolve_name(origin, module.rpartition(".")[0])
            names = {f"{origin}.{alias.name}" for alias in node.names}
            found |= {name if _known_as(name, known) else origin for name in names}
    return found


@cache
def _import_statements(source: str) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(parsed(source)) if isinstance(node, ast.Import | ast.ImportFrom)]


@cache
def uses_here() -> Uses:
    """Uses by import statements of every module of the floors."""
    return source_uses(module_files())


def source_uses(files: dict[str, Path]) -> Uses:
    """Uses by import statements."""
    return {
        module: {
            use
            for name in imported(path.read_text(encoding="utf-8"), module, files)
            if (use := _known_as(name, files)) and use != module
        }
        for module, path in files.items()
    }


def loaded_uses(files: dict[str, Path]) -> Uses:
    """Uses by what a loaded module's globals hold: modules, and functions, classes and objects that others define."""
    # All are loaded before the first is looked at: one may register something with another.
    loaded = {module: found for module in files if (found := _load(module))}
    uses: Uses = {}
    for module, found in loaded.items():
        owners = {owner for value in vars(found).values() for owner in _owners(value, found.__name__)}
        uses[module] = {use for owner in owners if (use := _known_as(owner, files)) and use != module}
    return uses


def circles(uses: Uses) -> list[list[str]]:
    """In each package, the files and folders in it that use one another in a circle, by their full names."""
    children: Uses = {}
    for module, used in uses.items():
        for other in used:
            one, two = _split(module, other)
            children.setdefault(one, set()).add(two)
    reach = {child: _reachable(children, child) for child in children}
    rings = {
        tuple(sorted(other for other in reach[child] if child in reach.get(other, ())))
        for child in children
        if child in reach[child]
    }
    return sorted(list(ring) for ring in rings)


def _load(module: str) -> ModuleType | None:
    """A module, or None where it is a command or needs a package that is not installed."""
    if module.endswith("__main__"):
        return None
    try:
        return importlib.import_module(module.removesuffix(".__init__"))
    except ImportError as error:
        if (error.name or "").split(".")[0] in FLOORS:
            raise
        return None


def _known_as(name: str, known: Collection[str]) -> str | None:
    return next((key for key in (name, f"{name}.__init__") if key in known), None)


def _owners(value: Any, holder: str, depth: int = 3) -> Iterator[str]:
    """The modules that define a value and what it holds."""
    if isinstance(value, ModuleType):
        # The import system puts a package's submodules there.
        if not value.__name__.startswith(f"{holder}."):
            yield value.__name__
    elif isinstance(value, dict | list | tuple | set | frozenset):
        for item in [*value.values(), *value] if isinstance(value, dict) else value:
            yield from _owners(item, holder, depth - 1) if depth else ()
    elif isinstance(owner := getattr(value, "__module__", None), str):
        yield owner
        if isinstance(value, type) and owner == holder:
            for item in [*value.__bases__, *vars(value).values()]:
                yield from _owners(item, holder, depth - 1) if depth else ()


def _split(one: str, two: str) -> tuple[str, str]:
    """The two children of the innermost common package that the modules lie in, or are."""
    parts, others = one.split("."), two.split(".")
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(parts, others, strict=False))))
    return ".".join(parts[: common + 1]), ".".join(others[: common + 1])


def _reachable(graph: Uses, start: str) -> set[str]:
    found, pending = set(), [start]
    while pending:
        new = graph.get(pending.pop(), set()) - found
        found |= new
        pending += new
    return found


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    first = sorted(sys.modules)
    uses = {module: sorted(used) for module, used in loaded_uses(module_files()).items()}
    json.dump({"first": first, "uses": uses}, sys.stdout)
