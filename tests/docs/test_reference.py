"""The reference holds what is public: what a package lists, and what the guide imports."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from tests.test_floors import FLOORS

DOCS = Path(__file__).parents[2] / "docs"
PUBLIC = [
    "builders",
    "attn_backends",
    *(
        f"spec_decode.{name}"
        for name in (
            "conformance",
            "drafter",
            "engine",
            "graphs",
            "matrix",
            "models",
            "paged",
            "sampling",
            "verification",
        )
    ),
]


def text_of(folder: str) -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / folder).glob("*.md")))


def documented() -> list[str]:
    return re.findall(r"^::: (\S+)$", text_of("reference"), re.MULTILINE)


def imported_by_the_guide() -> set[str]:
    code = re.findall(r"^```python\n(.*?)^```$", text_of("guide"), re.MULTILINE | re.DOTALL)
    nodes = [node for text in code for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in nodes if (node.module or "").split(".")[0] in FLOORS]
    return {f"{node.module}.{alias.name}" for node in ours for alias in node.names}


@pytest.mark.parametrize("package", PUBLIC)
def test_what_a_package_lists_is_documented_and_nothing_else_of_it(package: str) -> None:
    of_the_package = {name for name in documented() if name.rpartition(".")[0] == package}
    assert of_the_package == {f"{package}.{name}" for name in importlib.import_module(package).__all__}


def test_what_the_guide_imports_is_documented() -> None:
    assert imported_by_the_guide() - set(documented()) == set()


def test_nothing_is_documented_twice() -> None:
    names = documented()
    assert sorted(names) == sorted(set(names))


def test_every_documented_name_exists() -> None:
    for name in documented():
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_every_link_to_a_name_leads_to_the_page_that_documents_it_or_what_it_is_a_member_of() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md")))
    links = set(re.findall(r"\]\((?:\.\./)?reference/(\w+\.md)#([\w.]+)\)", pages))
    assert len(links) > 20
    known = {
        (page.name, name)
        for page in (DOCS / "reference").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    wrong = {link for link in links if link not in known and (link[0], link[1].rpartition(".")[0]) not in known}
    assert wrong == set()
