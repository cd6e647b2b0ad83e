"""Which packages that are not ours each file may import: by a statement, or by a string given to import_module or
find_spec."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

import pytest

from tests.import_graph import FLOORS, ROOT, imported, module_files, parsed

ANY = "*"
"""A name that only the running program knows, such as one from an entry point or an option."""
ALLOWED = {
    "builders": {"torch"},
    "builders/kernels/triton_runtime.py": {"triton"},
    "builders/flashinfer/wrappers.py": {"flashinfer"},
    "attn_backends": {"torch"},
    "attn_backends/engines/sglang": {"sglang"},
    "attn_backends/engines/vllm": {"flashinfer"},
    "attn_backends/engines/vllm/compat": {"vllm"},
    "attn_backends/fa3_providers.py": {"flash_attn_interface", "flash_attn_config", "sgl_kernel", "vllm"},
    "attn_backends/flashinfer.py": {"flashinfer"},
    "attn_backends/flashmla_package.py": {"flash_mla", "vllm"},
    "attn_backends/kernels/linear/streamed_tma_kernel.py": {"triton"},
    "attn_backends/registry.py": {ANY},
    "spec_decode": {"msgspec", "torch", "typing_extensions"},
    "spec_decode/cli": {"click", "rich"},
    "spec_decode/cli/checkout.py": {ANY},
    "spec_decode/cli/new.py": {ANY},
    "spec_decode/conformance/parametrize.py": {"pytest"},
    "spec_decode/graphs/cuda_loop.py": {"cuda"},
    "spec_decode/graphs/manager.py": {"rich"},
    "spec_decode/llm/chat_template.py": {"jinja2"},
    "spec_decode/llm/load.py": {"huggingface_hub"},
    "spec_decode/llm/progress.py": {"rich"},
    "spec_decode/matrix/page.py": {"jinja2", "markupsafe"},
    "spec_decode/matrix/terminal.py": {"rich"},
    "spec_decode/models/checkpoints": {"safetensors"},
    "spec_decode/models/hf": {"tokenizers", "transformers"},
    "spec_decode/models/pair.py": {"safetensors"},
    "spec_decode/source_digests.py": {ANY},
    "spec_decode/testing/interpreter.py": {"numpy", "triton"},
    "spec_decode/testing/interpreter_speed.py": {"triton"},
    "spec_decode/testing/pytest_plugin.py": {"pytest"},
    "engine_kits": {"torch", "triton", ANY},
    "engine_kits/sglang": {"sglang", "transformers"},
    "engine_kits/vllm": {"vllm"},
    "benchmarks": {"click", "flashinfer", "msgspec", "numpy", "rich", "torch", "transformers", "vllm"},
}
"""The packages of a folder's files, and of single files beyond those of their folders."""
LOADERS = ("import_module", "find_spec")


def packages(source: str) -> set[str]:
    """Return the packages that a source imports, without the standard library and our own."""
    names = imported(source, "here.module") | set(_loaded(parsed(source)))
    return {name.partition(".")[0] for name in names} - {*FLOORS, "here", *sys.stdlib_module_names}


def _loaded(tree: ast.Module) -> Iterator[str]:
    """Yield the names of modules given to LOADERS, or ANY for a call whose name no string of the source begins."""
    outside, functions = list[ast.AST](), list[ast.AST]()
    waiting: list[ast.AST] = [tree]
    for node in waiting:
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        (functions if inside else outside).append(node)
        waiting += () if inside else ast.iter_child_nodes(node)
    for scope in (outside, *(list(ast.walk(function)) for function in functions)):
        values = _values(outside) | _values(scope)
        for node in scope:
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in LOADERS:
                yield from set(_strings(node.args[0], values)) or {ANY}


def _values(scope: list[ast.AST]) -> dict[str, list[ast.expr]]:
    """Return what each name of a scope is assigned or takes in a loop; ANY for parameters."""
    found: dict[str, list[ast.expr]] = {}
    for node in scope:
        if isinstance(node, ast.arg):
            found.setdefault(node.arg, []).append(ast.Constant(ANY))
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "iter" if isinstance(node, ast.For | ast.comprehension) else "value", None)
        for name in (name for target in targets if target for name in ast.walk(target)):
            if isinstance(name, ast.Name) and isinstance(value, ast.expr):
                found.setdefault(name.id, []).append(value)
    return found


def _strings(node: ast.AST, values: dict[str, list[ast.expr]]) -> Iterator[str]:
    """Yield the strings that an expression can begin with, as far as the source has them."""
    if isinstance(node, ast.Constant):
        yield str(node.value)
        return
    parts = [value for name in ("value", "left", "body", "orelse", "func") if (value := getattr(node, name, None))]
    parts += getattr(node, "elts", [])
    parts += node.values[:1] if isinstance(node, ast.JoinedStr) else getattr(node, "values", [])
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    if name in values:
        # Without this name, so that one defined by itself ends.
        parts, values = values[name], {key: value for key, value in values.items() if key != name}
    for part in parts:
        yield from _strings(part, values)


def allowed(path: str) -> set[str]:
    return {package for place, found in ALLOWED.items() if within(path, place) for package in found}


def within(path: str, place: str) -> bool:
    return f"{path}/".startswith(f"{place}/")


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    files = module_files().values()
    return {str(path.relative_to(ROOT)): packages(path.read_text(encoding="utf-8")) for path in files}


def test_each_file_imports_only_the_packages_it_may(imports: dict[str, set[str]]) -> None:
    assert {path: more for path, names in imports.items() if (more := names - allowed(path))} == {}


def test_every_allowed_package_is_imported_somewhere(imports: dict[str, set[str]]) -> None:
    used = {place: set().union(*(names for path, names in imports.items() if within(path, place))) for place in ALLOWED}
    assert {place: more for place, names in ALLOWED.items() if (more := names - used[place])} == {}


def test_a_builder_imports_its_library_inside_a_function() -> None:
    lazy = (ast.FunctionDef, ast.AsyncFunctionDef)
    for module, path in module_files(floors=["builders"]).items():
        tree = parsed(path.read_text(encoding="utf-8"))
        eager = ast.Module([node for node in tree.body if not isinstance(node, (*lazy, ast.ClassDef))], [])
        assert packages(ast.unparse(eager)) <= {"torch", "triton"}, module


@pytest.mark.parametrize(
    ("source", "package"),
    [
        ("import flash_mla.interface", "flash_mla"),
        ("def late():\n    from flash_mla import interface", "flash_mla"),
        ("import_module('flash_mla.interface')", "flash_mla"),
        ("importlib.util.find_spec('flash_mla')", "flash_mla"),
        ("import_module(f'flash_mla.{name}')", "flash_mla"),
        ("NAMES = ('flash_mla', 'builders')\nfor name in NAMES:\n    import_module(name)", "flash_mla"),
        ("class Kind:\n    module = 'flash_mla.kernels'\ndef load(kind):\n    import_module(kind.module)", "flash_mla"),
        ("def load(name):\n    import_module(name)", ANY),
    ],
)
def test_every_way_to_import_a_package_is_seen(source: str, package: str) -> None:
    assert packages(source) == {package}


def test_a_file_has_the_packages_of_its_folders() -> None:
    assert allowed("builders/flashinfer/wrappers.py") == {"torch", "flashinfer"}
    assert allowed("builders_of_ours/flashinfer.py") == set()
