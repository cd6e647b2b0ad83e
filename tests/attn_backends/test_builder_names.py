"""A builder's file is named after its backend; if another backend uses it too, the two files name each other."""

from __future__ import annotations

import ast

import pytest

from tests.import_graph import ROOT, parsed


def imported_from(source: str) -> dict[str, str]:
    """Return the module of each name that a source imports from one."""
    nodes = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in nodes for alias in node.names}


def builders_of(source: str) -> set[str]:
    """Return the files or folders of builders/ whose classes a backend's source takes as `builder`, or extends."""
    classes = {node.name: node for node in parsed(source).body if isinstance(node, ast.ClassDef)}
    assigned = [node for owner in classes.values() for node in owner.body if isinstance(node, ast.Assign)]
    names = {ast.unparse(node.value) for node in assigned if ast.unparse(node.targets[0]) == "builder"}
    bases = {ast.unparse(base) for name in names & classes.keys() for base in classes[name].bases}
    origins = imported_from((ROOT / "builders/__init__.py").read_text()) | {
        name: module for name, module in imported_from(source).items() if module != "builders"
    }
    return {origins[name].split(".")[1] for name in (names - classes.keys()) | bases}


def misnamed(backend: str, source: str, builders: dict[str, str]) -> set[str]:
    """Return the builders that have neither the backend's name nor a line each way."""
    docstring = ast.get_docstring(parsed(source)) or ""
    return {
        builder
        for builder in builders_of(source) - {backend}
        if f"builders/{builder}.py" not in docstring
        or backend not in (ast.get_docstring(parsed(builders[builder])) or "")
    }


SOURCES = {path.stem: path.read_text() for path in sorted((ROOT / "attn_backends").glob("*.py"))}
BACKENDS = {name: source for name, source in SOURCES.items() if builders_of(source)}
BUILDERS = {path.stem: path.read_text() for path in (ROOT / "builders").glob("*.py")}


def test_every_backend_is_found() -> None:
    assert {"flashinfer", "flashmla_sparse", "torch_reference"} <= BACKENDS.keys() and len(BACKENDS) >= 9


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_builder_has_its_backends_name_or_names_it(backend: str) -> None:
    assert misnamed(backend, BACKENDS[backend], BUILDERS) == set()


def test_a_file_that_names_another_backend_is_found() -> None:
    source = '"""See builders/one.py."""\nfrom builders.one import A\nclass B(A): ...\nclass C:\n    builder = B'
    assert misnamed("two", source, {"one": '"""For two."""'}) == set()
    assert misnamed("two", source, {"one": '"""For one."""'}) == {"one"}
    assert misnamed("two", source.replace("/one", "/two"), {"one": '"""For two."""'}) == {"one"}
