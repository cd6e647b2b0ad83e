"""The glossary's terms exist in the code, and retired words exist nowhere."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable

import pytest

from tests.import_graph import ROOT, module_files, parsed
from tests.retired_words import files, retired

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


def test_every_term_with_a_name_in_code_exists_there() -> None:
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


def test_a_class_name_stands_for_one_thing() -> None:
    assert repeated(class_names(path.read_text(encoding="utf-8") for path in module_files().values())) == set()
    assert repeated(class_names(["class Row: ...", "class _Row: ...", "class Row: ..."])) == {"Row"}


def test_no_term_is_explained_twice() -> None:
    explained = [term for term, _ in terms(GLOSSARY)]
    assert len(explained) > 40
    assert sorted(explained) == sorted(set(explained))


def test_no_file_has_a_retired_word() -> None:
    found = {name: words for name, text in files() if (words := retired(name, text))}
    assert found == {}


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("builders/a.py", "weak_groups = 1", True),
        ("builders/a.py", "class WeakGroup: ...", True),
        ("builders/a.py", "def f(*, keep_last): ...", True),
        ("builders/a.py", "self.upkeep = 1", True),
        ("builders/a.py", "f(scene=1)", True),
        ("builders/weak.py", "", True),
        ("builders/a.py", "# A weak group.", True),
        ("builders/a.py", '"""A Weak group."""', True),
        ("spec_decode/engine/a.py", "class Rows: ...", True),
        ("tests/spec_decode/engine/test_a.py", "def test_a_verdict_is_read_late(): ...", True),
        ("docs/a.md", "The target's pass", True),
        ("docs/a.md", "a verdict", True),
        ("builders/a.py", "import weakref\nweakref.ref(x)", False),
        ("builders/a.py", "class Rows: ...", False),
        ("builders/a.py", "path.join(a)\nF.one_hot(x)", False),
        ("attn_backends/a.py", "verdict = explain(spec)", False),
        ("docs/a.md", "pass it on, and join the others outside", False),
    ],
)
def test_a_retired_word_is_found_and_no_other_use_of_its_letters(name: str, text: str, found: bool) -> None:
    assert bool(retired(name, text)) is found
