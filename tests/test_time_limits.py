"""No test may fail because of a slow machine: none contains a time limit. faulthandler_timeout shows a hang."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.import_graph import parsed

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("*.py"))
_LIMITS = {"timeout", "timeout_s", "deadline", "max_seconds"}
_CLOCKS = {"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time"}
_WAITS = {"wait", "join", "result", "communicate", "acquire", "set_default_timeout", "alarm", "wait_for_timeout"}
_SUSPECT = re.compile(
    rf"\b(?:{'|'.join(_LIMITS)})\s*=|\b(?:{'|'.join(_CLOCKS)})\(|\b(?:{'|'.join(_WAITS)})\((?:$|.*\d)", re.MULTILINE
)
"""Whatever has a limit has this too."""


def limits(source: str) -> Iterator[int]:
    """The lines with a limit: given as an option, given to something that waits, or a clock that is compared."""
    if not _SUSPECT.search(source):  # most files, which then need not be parsed
        return
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.keyword) and node.arg in _LIMITS and ast.unparse(node.value) != "None":
            yield node.value.lineno
        if isinstance(node, ast.Call) and _name(node) in _WAITS:
            yield from (given.lineno for given in node.args if _is_a_number(given))
        if isinstance(node, ast.Compare) and any(_name(call) in _CLOCKS for call in ast.walk(node)):
            yield node.lineno


def _name(node: ast.AST) -> str:
    called = node.func if isinstance(node, ast.Call) else None
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def _is_a_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value > 0


def test_no_test_has_a_limit_of_time() -> None:
    found = [f"{path.relative_to(TESTS)}:{line}" for path in FILES for line in limits(path.read_text(encoding="utf-8"))]
    assert not found


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("subprocess.run(command, timeout=300)", [1]),
        ("settings(deadline=200)", [1]),
        ("assert time.perf_counter() - start < 5", [1]),
        ("assert began + 3 > monotonic()", [1]),
        ("thread.join(5)", [1]),
        ("process.wait(0.5)", [1]),
        ("page.set_default_timeout(5000)", [1]),
        *((code, []) for code in ("settings(deadline=None)", "process.wait()", "' '.join(words)", "seconds < 5")),
        ("start = perf_counter()", []),
    ],
)
def test_only_time_limits_are_detected(code: str, lines: list[int]) -> None:
    assert list(limits(code)) == lines
