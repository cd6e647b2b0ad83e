"""The glossary's terms exist in the code, and each is explained once."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable

from tests.import_graph import ROOT, module_files, parsed

GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")


def terms(page: str) -> list[tuple[str, list[str]]]:
    """Each row's term, and the names it has in code."""
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| ")]
    return [(term.strip(), re.findall(r"`(\w+)`", code)) for term, code in rows if term.strip() != "term"]


def defined(source: str) -> set[str]:
    """What a module defines: functions, classes, arguments and names that are assigned to."""
    nodes = list(ast.walk(parsed(source)))
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return names | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def test_glossary_names_exist_in_code() -> None:
    missing = {name for _, code in terms(GLOSSARY) for name in code}
    for path in module_files().values():
        source = path.read_text(encoding="utf-8")
        if not missing.isdisjoint(re.findall(r"\w+", source)):
            missing -= defined(source)
    assert missing == set()
    assert defined("class A:\n    def f(self, x): ...\ny = z.w") == {"A", "f", "self", "x", "y"}


def class_names(sources: Iterable[str]) -> list[str]:
    """Public classes that sources define outside of other things."""
    bodies = (parsed(source).body for source in sources)
    return [node.name for body in bodies for node in body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]


def repeated(names: list[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def test_class_name_is_defined_once() -> None:
    assert repeated(class_names(path.read_text(encoding="utf-8") for path in module_files().values())) == set()
    assert repeated(class_names(["class Row: ...", "class _Row: ...", "class Row: ..."])) == {"Row"}


def test_glossary_terms_are_unique() -> None:
    explained = [term for term, _ in terms(GLOSSARY)]
    assert len(explained) > 40
    assert sorted(explained) == sorted(set(explained))
