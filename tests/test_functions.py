"""Functions are short, take few parameters, and document what they raise."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain

import pytest

from tests.import_graph import module_files, parsed

MAX_LINES, MAX_PARAMETERS = 80, 8
RAISERS = {"require": "BatchError", "require_tensor": "BatchError", "expect": "CheckFailure"}
"""What these functions raise for the one that calls them."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Function:
    """A function with what stands around it. public: it can be called from other modules."""

    name: str
    node: Definition
    public: bool
    class_docstring: str = ""

    @property
    def decorators(self) -> str:
        return " ".join(ast.unparse(decorator) for decorator in self.node.decorator_list)

    @property
    def is_kernel(self) -> bool:
        return "triton.jit" in self.decorators

    @property
    def is_command(self) -> bool:
        """Its docstring is shown to users of the command line."""
        return "click.command" in self.decorators

    @property
    def is_check(self) -> bool:
        """It raises where the contract is broken, as every check does."""
        return self.decorators.startswith(("check(", "builder(", "numerics(", "graph("))

    @property
    def launches(self) -> bool:
        """Whether it calls a kernel on a grid, with all the kernel's arguments."""
        calls = [node for node in ast.walk(self.node) if isinstance(node, ast.Call)]
        return any(isinstance(call.func, ast.Subscript) for call in calls)

    @property
    def docstring(self) -> str:
        own = ast.get_docstring(self.node) or ""
        return f"{own} {self.class_docstring}" if self.node.name == "__init__" else own


@cache
def functions(source: str, module: str = "") -> list[Function]:
    """Every function of a source, those inside of classes and functions too."""
    return list(_functions(parsed(source), module, True, ""))


def _functions(parent: ast.AST, prefix: str, public: bool, class_docstring: str) -> Iterator[Function]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.ClassDef):
            inside = public and not node.name.startswith("_")
            yield from _functions(node, f"{prefix}.{node.name}", inside, ast.get_docstring(node) or "")
        elif isinstance(node, Definition):
            seen = public and (node.name == "__init__" or not node.name.startswith("_"))
            yield Function(f"{prefix}.{node.name}", node, seen, class_docstring)
            yield from _functions(node, f"{prefix}.{node.name}", False, "")
        else:
            yield from _functions(node, prefix, public, class_docstring)


def too_long(function: Function) -> str:
    """Why a function is too long, or nothing."""
    lines = (function.node.end_lineno or 0) - function.node.lineno + 1
    return f"{lines} lines" if lines > MAX_LINES and not function.is_kernel else ""


def too_wide(function: Function) -> str:
    """Why a function has too many parameters, or nothing."""
    arguments = function.node.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    count = len(names) - (names[:1] in (["self"], ["cls"]))
    return f"{count} parameters" if count > MAX_PARAMETERS and not (function.is_kernel or function.launches) else ""


def silent(function: Function) -> str:
    """Which errors a public function raises on its own and does not name in its docstring."""
    if not function.public or function.is_command or function.is_check:
        return ""
    missing = sorted({error for error in _raised(function.node) if error not in function.docstring})
    return f"does not say that it raises {', '.join(missing)}" if missing else ""


def described(docstring: str) -> set[str]:
    """Return the names that a docstring explains: "name: text" begins a sentence, or "name  text" a line."""
    sentence = r"(?:\A|[.;]\s+|\n\n)(NAMES):\s"
    row = r"(?m:^)(NAMES) {2,}\S"
    violations = [
        re.findall(form.replace("NAMES", r"[a-z_]\w*(?:, [a-z_]\w*)*"), docstring) for form in (sentence, row)
    ]
    return {name for names in chain(*violations) for name in names.split(", ")}


def renamed(function: Function) -> str:
    """Which names a public function's docstring explains that are no parameters of it."""
    own = ast.get_docstring(function.node) or ""
    missing = described(own) - {node.arg for node in ast.walk(function.node.args) if isinstance(node, ast.arg)}
    return f"explains {', '.join(sorted(missing))}, no parameter" if function.public and missing else ""


def _raised(node: ast.AST) -> Iterator[str]:
    """Classes of errors that leave a function from its own statements, not from those of inner functions."""
    if isinstance(node, ast.Raise) and node.exc is not None:
        error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        name = ast.unparse(error).rpartition(".")[2]
        # A lower-case name is an error that came from elsewhere.
        if name[:1].isupper():
            yield name
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RAISERS:
        yield RAISERS[node.func.id]
    types = [handler.type for handler in node.handlers if handler.type] if isinstance(node, ast.Try) else []
    caught = {name.id for kind in types for name in ast.walk(kind) if isinstance(name, ast.Name)}
    body = node.body if isinstance(node, ast.Try) else []
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Definition | ast.Lambda | ast.ClassDef):
            yield from (name for name in _raised(child) if child not in body or name not in caught)


def violations(rule: Callable[[Function], str]) -> dict[str, str]:
    return {
        function.name: why
        for module, path in module_files().items()
        for function in functions(path.read_text(encoding="utf-8"), module.removesuffix(".__init__"))
        if (why := rule(function))
    }


@pytest.mark.parametrize("rule", [too_long, too_wide, silent, renamed])
def test_functions_follow_the_rule(rule: Callable[[Function], str]) -> None:
    assert violations(rule) == {}


BODY = "\n".join(["    pass"] * MAX_LINES)
PARAMETERS = ", ".join(f"p{i}" for i in range(MAX_PARAMETERS))


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (too_long, f"def f():\n{BODY}"),
        (too_wide, f"def f({PARAMETERS}, *, more): ..."),
        (silent, "def f():\n    raise ValueError('no')"),
        (silent, "def f():\n    '''Raises.'''\n    if x:\n        raise errors.ValueError"),
        (silent, "class C:\n    '''A class.'''\n    def __init__(self):\n        raise ValueError('no')"),
        (silent, "if x:\n    def f():\n        require(x, 'no')"),
        (silent, "def f():\n    try: ...\n    except ValueError as error:\n        raise ValueError('no') from error"),
        (renamed, "def f(built):\n    '''Attend. rebuilt: group indices.'''"),
        (renamed, "def f(built):\n    '''Attend.\n\n    rebuilt  int32 [n]\n    '''"),
        (renamed, "class C:\n    def __init__(self, a):\n        '''a, b: group indices.'''"),
    ],
)
def test_function_breaking_a_rule_is_detected(rule: Callable[[Function], str], source: str) -> None:
    assert [function.name for function in functions(source) if rule(function)] in ([".f"], [".C.__init__"])


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (too_long, f"@triton.jit\ndef f():\n{BODY}"),
        (too_long, f"def f():\n{BODY[9:]}"),
        (too_wide, f"class C:\n    def f(self, {PARAMETERS}): ..."),
        (too_wide, f"@triton.jit\ndef f({PARAMETERS}, more): ..."),
        (too_wide, f"def f({PARAMETERS}, more):\n    kernel[grid](more)"),
        (silent, "def f():\n    '''Raises ValueError.'''\n    raise ValueError('no')"),
        (silent, "class C:\n    '''Raises ValueError.'''\n    def __init__(self):\n        raise ValueError('no')"),
        (silent, "def f():\n    '''Raises BatchError.'''\n    require(x, 'no')"),
        (silent, "def f():\n    try: ...\n    except ValueError as error:\n        raise error"),
        (silent, "def f():\n    try:\n        raise ValueError('no')\n    except ValueError as error: ..."),
        (silent, "def f():\n    def g():\n        raise ValueError('no')"),
        (silent, "def _f():\n    raise ValueError('no')"),
        (silent, "@check('family.name')\ndef f():\n    raise CheckFailure('no')"),
        (renamed, "def f(a, *b, c, **d):\n    '''Attend; a, b: rows. c: a row.\n\n    d  more\n    '''"),
        (renamed, "def f(a):\n    '''a: what is\n    written: here.'''"),
        (silent, "@click.command()\ndef f():\n    raise SystemExit(1)"),
    ],
)
def test_function_following_rule_or_exempt_is_ignored(rule: Callable[[Function], str], source: str) -> None:
    assert not [function.name for function in functions(source) if rule(function)]
