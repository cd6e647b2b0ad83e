"""Kernels name their parameters as the field does, document what they compute, and are launched by keyword."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from tests.import_graph import module_files, parsed

Rule = Callable[[str], Iterator[str]]
CONTENT = ("fp32", "int", "uint8", "[", "out:", "in and out:")
"""How the comment beside a tensor's parameter begins."""


@cache
def kernels(source: str) -> list[ast.FunctionDef]:
    """Functions that Triton compiles, those of them that are launched, by their names."""
    if "triton.jit" not in source:
        return []
    named = [n for n in ast.walk(parsed(source)) if isinstance(n, ast.FunctionDef) and n.name.endswith("_kernel")]
    return [node for node in named if any("triton.jit" in ast.unparse(d) for d in node.decorator_list)]


def unlike_the_fields(source: str) -> Iterator[str]:
    """Parameters of tensors that do not end in _ptr, and strides that do not begin with stride_."""
    lines = source.splitlines()
    for kernel in kernels(source):
        for argument in kernel.args.args:
            beside = lines[argument.lineno - 1].partition("  # ")[2]
            tensor = argument.annotation is None and beside.startswith(CONTENT) and "[" in beside
            if (tensor and not argument.arg.endswith("_ptr")) or argument.arg.endswith("_stride"):
                yield f"{kernel.name}: {argument.arg}"


def several_a_line(source: str) -> Iterator[str]:
    """Kernels of which two parameters share a line."""
    for kernel in kernels(source):
        lines = [argument.lineno for argument in kernel.args.args]
        if len(set(lines)) < len(lines):
            yield kernel.name


def silent(source: str) -> Iterator[str]:
    """Kernels that say neither what a program does nor what the grid is."""
    for kernel in kernels(source):
        docstring = (ast.get_docstring(kernel) or "").lower()
        if "program" not in docstring and "grid" not in docstring and "one token's" not in docstring:
            yield kernel.name


def by_position(source: str) -> Iterator[str]:
    """Kernels that are launched with an argument by its position."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and node.args:
            yield from [name] if (name := ast.unparse(node.func.value)).endswith("_kernel") else []


@pytest.mark.parametrize("rule", [unlike_the_fields, several_a_line, silent, by_position])
def test_kernels_follow_the_rule(rule: Rule) -> None:
    found = {name: list(rule(path.read_text(encoding="utf-8"))) for name, path in module_files().items()}
    assert {name: broken for name, broken in found.items() if broken} == {}


KERNEL = """
@triton.jit
def f_kernel(
    x_ptr,  # [T, H]
    count,  # T, as [0] of a shape
    stride_x,
    BLOCK: tl.constexpr,
):
    '''y = x. One program per row.'''
"""


@pytest.mark.parametrize(
    ("rule", "old", "new"),
    [
        (unlike_the_fields, "x_ptr,", "x,"),
        (unlike_the_fields, "x_ptr,  # [T, H]", "x,  # out: fp32 [T, H]"),
        (unlike_the_fields, "stride_x", "x_stride"),
        (several_a_line, "    stride_x,\n    BLOCK", "    stride_x, BLOCK"),
        (silent, "One program per row", "For every row"),
        (silent, "'''y = x. One program per row.'''", "pass"),
    ],
)
def test_kernel_breaking_a_rule_is_detected(rule: Rule, old: str, new: str) -> None:
    assert not list(rule(KERNEL)) and len(list(rule(KERNEL.replace(old, new)))) == 1


def test_positional_launch_is_detected() -> None:
    assert list(by_position("f_kernel[(1,)](x, BLOCK=1)")) == ["f_kernel"]
    assert not list(by_position("f_kernel[(1,)](x_ptr=x, BLOCK=1)\ntable[0](x)"))
