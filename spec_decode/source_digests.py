"""What evidence covers: digests of the product's source, so that a report can be told from one of other code."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent

ROUNDS = (
    *("builders", "attn_backends"),
    *("spec_decode.graphs", "spec_decode.sampling", "spec_decode.models", "spec_decode.trees"),
    "spec_decode.drafter",
)
"""Packages that a timed round of a drafter covers, and each of its parts."""
CHECKS = (*ROUNDS, "spec_decode.testing", "spec_decode.conformance")
"""Packages that a check covers."""
SOAKS = (*ROUNDS, "spec_decode.testing", "spec_decode.tools.soak")
"""Packages that a soak covers."""
SERVING = (*ROUNDS, "spec_decode.verification", "spec_decode.engine")
"""Packages that a run of the whole engine covers."""


def source_digests(packages: Iterable[str]) -> dict[str, str]:
    """A digest for each package, of its .py files and those of the packages in it.

    It is of their syntax without comments and docstrings, and the same under every version of Python that runs them.
    """
    return {package: _digest(package) for package in packages}


def changed_since(sources: dict[str, str]) -> list[str]:
    """The packages whose source is no longer what it was when the digests were taken, or that are no more."""
    return [package for package, digest in sources.items() if _digest(package) != digest]


@cache
def _digest(package: str) -> str:
    folder = _ROOT.joinpath(*package.split("."))
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).parts):
        found.update(f"{path.relative_to(folder).as_posix()}\n{syntax_of(path.read_bytes())}\n".encode())
    return found.hexdigest()[:16]


def syntax_of(source: bytes) -> str:
    """The syntax of a module as text. `ast.dump` would not do: what it writes differs between versions of Python."""
    return _text(ast.parse(source))


def _text(node: Any) -> str:
    if isinstance(node, ast.JoinedStr):
        # Python 3.12 ends a nested format with an empty piece.
        return f"JoinedStr({','.join(_text(piece) for piece in node.values if getattr(piece, 'value', None) != '')})"
    if isinstance(node, ast.AST):
        # A field that a later Python adds is empty in the sources of an earlier one.
        fields = [f"{name}={_text(value)}" for name, value in ast.iter_fields(node) if value not in (None, [])]
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(_text(item) for item in node if not _is_docstring(item))}]"
    return repr(node)


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
