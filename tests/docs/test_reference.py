"""The reference lists everything public: what packages list, and what the guide imports."""

from __future__ import annotations

import ast
import importlib
import re

import pytest

from tests.docs.pages import DOCS, blocks
from tests.import_graph import FLOORS

ROOMS = ("conformance", "drafter", "engine", "graphs", "matrix", "models", "paged", "sampling", "verification")
PUBLIC = ["builders", "attn_backends", *(f"spec_decode.{room}" for room in ROOMS)]


def documented() -> list[tuple[str, str]]:
    """Every name of the reference with the page that documents it."""
    pages = [(page.name, page.read_text(encoding="utf-8")) for page in sorted((DOCS / "reference").glob("*.md"))]
    return [(page, name) for page, text in pages for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)]


NAMES = [name for _, name in documented()]


def imported_by_the_guide() -> set[str]:
    pages = (DOCS / "guide").glob("*.md")
    code = [block.text for page in pages for block in blocks(page) if block.info == "python"]
    nodes = [node for text in code for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in nodes if (node.module or "").split(".")[0] in FLOORS]
    return {f"{node.module}.{alias.name}" for node in ours for alias in node.names}


@pytest.mark.parametrize("package", PUBLIC)
def test_package_exports_are_exactly_the_documented_names(package: str) -> None:
    of_the_package = {name for name in NAMES if name.rpartition(".")[0] == package}
    assert of_the_package == {f"{package}.{name}" for name in importlib.import_module(package).__all__}


def test_guide_imports_are_documented() -> None:
    assert imported_by_the_guide() - set(NAMES) == set()


def test_nothing_is_documented_twice() -> None:
    assert sorted(NAMES) == sorted(set(NAMES))


def test_every_documented_name_exists() -> None:
    for name in NAMES:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_every_reference_link_leads_to_its_page() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md")))
    links = set(re.findall(r"\]\((?:\.\./)?reference/(\w+\.md)#([\w.]+)\)", pages))
    assert len(links) > 20
    known = set(documented())
    wrong = {link for link in links if link not in known and (link[0], link[1].rpartition(".")[0]) not in known}
    assert wrong == set()
