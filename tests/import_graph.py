"""Which of our modules uses which: according to their source, and to the objects they hold once loaded.

`python -m tests.import_graph MODULE...` loads those modules, then all others, and prints as JSON what the first step
loaded, and the uses found in loaded modules.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
FLOORS = ["builders", "attn_backends", "spec_decode", "engine_kits", "benchmarks"]
"""Lowest first."""

parsed = cache(ast.parse)
"""Syntax tree of a source, cached because several tests walk it."""
Uses = dict[str, set[str]]
"""For each module, the modules it uses. A package's __init__ file is called package.__init__."""


def module_files(root: Path = ROOT, floors: Iterable[str] = FLOORS) -> dict[str, Path]:
    """Return every module of the floors with its file."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts): path
        for floor in floors
        for path in sorted((root / floor).rglob("*.py"))
    }


def imported(source: str, module: str = "", known: Collection[str] = ()) -> set[str]:
    """Return everything a module imports, including inside functions and for type checking only.

    `from package import name` counts as package.name if that is a known module, otherwise as package.
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
    """Return the uses of every module of the floors, by import statement."""
    return source_uses(module_files())


def source_uses(files: dict[str, Path]) -> Uses:
    return {
        module: {
            use
            for name in imported(path.read_text(encoding="utf-8"), module, files)
            if (use := _known_as(name, files)) and use != module
        }
        for module, path in files.items()
    }


def loaded_uses(files: dict[str, Path]) -> Uses:
    """Return uses by what a loaded module's globals hold: modules, and objects that other modules define."""
    # Load all before inspecting any: one can register something with another.
    loaded = {module: found for module in files if (found := _load(module))}
    uses: Uses = {}
    for module, found in loaded.items():
        owners = {owner for value in vars(found).values() for owner in _owners(value, found.__name__)}
        uses[module] = {use for owner in owners if (use := _known_as(owner, files)) and use != module}
    return uses


_SPY = """
import json, os, sys
import torch, triton
class Spy:
    find_spec = staticmethod(lambda name, *given: found.add(name))
for script in json.load(sys.stdin):
    if os.fork():
        assert os.wait()[1] == 0
        continue
    found = set()
    sys.meta_path.insert(0, Spy)
    exec(script, {"__name__": "__main__"})
    print(json.dumps(sorted(found)), flush=True)
    os._exit(0)
"""
"""Runs each script in a fork of a process that has loaded what every user loads, and nothing of ours."""


@cache
def loaded_by(*scripts: str) -> list[dict[str, Path]]:
    """Return our modules, with their files, that another process imports in each script, or fails to import there."""
    command = [sys.executable, "-c", _SPY]
    done = subprocess.run(command, cwd=ROOT, input=json.dumps(scripts), stdout=subprocess.PIPE, text=True, check=True)
    loaded = [{*json.loads(line)} for line in done.stdout.splitlines()]
    return [
        {module: path for module, path in module_files().items() if module.removesuffix(".__init__") in names}
        for names in loaded
    ]


def circles(uses: Uses) -> list[list[str]]:
    """Return, for each package, the files and folders in it that use one another in a cycle, by full name."""
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
    """Import a module; return None if it is a command or needs a package that is not installed."""
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
    """Yield the modules that define a value and what it contains."""
    if isinstance(value, ModuleType):
        # The import system adds a package's submodules to it.
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
    """Return the children of the innermost common package in which the two modules lie."""
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
