"""Which source a report was made from: the modules that its run can load, each with a digest."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from attn_backends import BackendError, registry

PROJECT = ("builders", "attn_backends", "spec_decode", "engine_kits")
"""The packages whose modules count wherever they are used. Those of a root's own package count too."""

RECORDERS = frozenset(f"spec_decode.{name}" for name in ("environment", "files", "source_digests"))
"""Modules that only write reports: they do not affect results, so changing them makes no evidence older."""

Digests = dict[str, str]
"""Module name -> digest."""


class SourceRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The source that a report was made from.

    modules: package -> its modules with their digests, sorted. parts: the modules that a part of the report depends on,
    as ascending indices; a part is a family of checks or a case of the bench, and a part without an entry depends on
    all modules. Raises ValueError for an index out of range.
    """

    modules: dict[str, Digests] = {}
    parts: dict[str, tuple[int, ...]] = {}

    def __post_init__(self) -> None:
        count = sum(map(len, self.modules.values()))
        if wrong := [index for part in self.parts.values() for index in part if not 0 <= index < count]:
            raise ValueError(f"parts must index the {count} modules, got {wrong[0]}")

    @classmethod
    def of(cls, roots: Mapping[str, Iterable[str]]) -> SourceRecord:
        """Record the modules behind the roots of each part; see `digests_behind`."""
        behind = {part: digests_behind(found) for part, found in roots.items()}
        modules: dict[str, Digests] = {}
        for name, digest in sorted({item for digests in behind.values() for item in digests.items()}, key=_place):
            package, _, module = name.rpartition(".")
            modules.setdefault(package, {})[module] = digest
        index = {name: i for i, (name, _) in enumerate(_flat(modules))}
        parts = {part: tuple(sorted(index[name] for name in found)) for part, found in behind.items()}
        return cls(modules=modules, parts=parts)

    def changed(self, parts: Iterable[str] = ()) -> tuple[str, ...]:
        """Return the modules that have changed or are gone; restricted to these parts, if any are named."""
        modules = list(_flat(self.modules))
        every = range(len(modules))
        wanted = [self.parts.get(part, every) for part in parts] or [every]
        return tuple(modules[i][0] for i in sorted(set().union(*wanted)) if _changed(*modules[i]))


def backend_modules(names: Iterable[str]) -> list[str]:
    """Return the modules that define the registered backends and builders that load here; no module imports them."""
    found: list[str] = []
    for name in names:
        with suppress(BackendError):
            backend = registry.load(name)
            found += [type(backend).__module__, backend.builder.__module__]
    return found


def digests_behind(roots: Iterable[str]) -> Digests:
    """Return the digests of the roots and of every module that they import, directly or indirectly.

    Imports inside functions count too; imports under TYPE_CHECKING do not. `from package import name` counts the module
    that defines the name, not the package that lists it. A backend that the registry loads by name is imported by no
    module, so pass it as a root. A digest covers the syntax without comments and docstrings, and is the same in every
    version of Python. A root without a source file, such as one typed into a shell, has no entry.
    """
    roots = list(roots)
    packages = frozenset((*PROJECT, *map(_top, roots)))
    found: Digests = {}
    pending = roots
    while pending:
        name = pending.pop()
        if name not in found and name not in RECORDERS and (module := _module(name)):
            found[name] = module.digest
            pending += _uses(name, packages)
    return dict(sorted(found.items()))


def _top(module: str) -> str:
    return module.partition(".")[0]


def _place(item: tuple[str, str]) -> tuple[str, str]:
    package, _, module = item[0].rpartition(".")
    return package, module


def _flat(modules: Mapping[str, Digests]) -> Iterator[tuple[str, str]]:
    """Yield each module's full name with its digest."""
    for package, digests in modules.items():
        for module, digest in digests.items():
            yield f"{package}.{module}" if package else module, digest


def _changed(name: str, digest: str) -> bool:
    module = _module(name)
    return module is None or module.digest != digest


@dataclass(frozen=True, slots=True)
class _Module:
    digest: str
    imports: tuple[tuple[str, str, str], ...]
    """(module, name, name here) of each `from module import name as name here`; (module, "", "") of `import module`."""


@cache
def _uses(module: str, packages: frozenset[str]) -> tuple[str, ...]:
    """Return the modules of these packages that a module imports. Other packages are not read: torch alone is larger
    than all of them."""
    found = _module(module)
    imports = found.imports if found else ()
    uses = [_definer(origin, name, packages) if name else origin for origin, name, _ in imports]
    return tuple(use for use in uses if _top(use) in packages)


def _definer(origin: str, name: str, packages: frozenset[str]) -> str:
    """Return the module that defines what `from origin import name` imports, as far as top-level imports tell."""
    if _top(origin) not in packages:
        return origin
    if _file(f"{origin}.{name}"):
        return f"{origin}.{name}"
    package = _module(origin)
    for deeper, its_name, here in package.imports if package else ():
        if here == name:
            return _definer(deeper, its_name, packages)
    return origin


@cache
def _module(name: str) -> _Module | None:
    file = _file(name)
    if file is None:
        return None
    tree = ast.parse(file.read_bytes())
    digest = hashlib.sha256(syntax_of(tree).encode()).hexdigest()[:8]
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    return _Module(digest, tuple(_imports(tree, package)))


@cache
def _file(name: str) -> Path | None:
    top, _, rest = name.partition(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # a module without a spec, such as __main__
        spec = None
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    if spec and not folders:
        return Path(spec.origin) if spec.origin and not rest and spec.origin.endswith(".py") else None
    for base in (folder.joinpath(*rest.split(".")) if rest else folder for folder in folders):
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return file
    return None


def _imports(node: ast.AST, package: str) -> Iterator[tuple[str, str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, "", "") for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            origin = "." * child.level + (child.module or "")
            origin = importlib.util.resolve_name(origin, package) if child.level else origin
            yield from ((origin, alias.name, alias.asname or alias.name) for alias in child.names)
        elif isinstance(child, ast.If) and _is_type_checking(child.test):
            yield from _imports(ast.Module(child.orelse, []), package)
        else:
            yield from _imports(child, package)


def _is_type_checking(test: ast.expr) -> bool:
    """Whether the branch is never taken at run time."""
    return isinstance(test, ast.Name | ast.Attribute) and ast.unparse(test).endswith("TYPE_CHECKING")


def syntax_of(node: Any) -> str:
    """Serialize a syntax tree as text. `ast.dump` does not work here: its output differs between versions of Python."""
    if isinstance(node, ast.JoinedStr):
        # Python 3.12 ends a nested format with an empty piece.
        return (
            f"JoinedStr({','.join(syntax_of(piece) for piece in node.values if getattr(piece, 'value', None) != '')})"
        )
    if isinstance(node, ast.AST):
        # A field added by a later Python is empty in sources written for an earlier one.
        fields = [f"{name}={syntax_of(value)}" for name, value in ast.iter_fields(node) if value not in (None, [])]
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(syntax_of(item) for item in node if not _is_docstring(item))}]"
    return repr(node)


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
