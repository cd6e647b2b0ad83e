"""Imports run downwards only: no floor knows what lies above it, nor the tests and examples."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ["builders", "attn_backends", "spec_decode"]
"""From the ground up."""
OUTSIDE = ["tests", "examples", "scripts"]


def imports(source: str) -> set[str]:
    """The packages that a module imports, wherever in it: inside functions and for types alone, too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_imports_nothing_from_above(floor: str) -> None:
    above = {*FLOORS[FLOORS.index(floor) + 1 :], *OUTSIDE}
    upwards = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / floor).rglob("*.py"))
        for name in sorted(imports(path.read_text(encoding="utf-8")) & above)
    ]
    assert not upwards


@pytest.mark.parametrize(
    "line",
    [
        "import spec_decode.conformance.report",
        "from spec_decode import report",
        "def late():\n    from spec_decode.drafter import Drafter",
        "if TYPE_CHECKING:\n    import torch, spec_decode",
    ],
)
def test_every_way_to_import_is_seen(line: str) -> None:
    assert "spec_decode" in imports(line)


def test_a_name_in_a_text_is_no_import() -> None:
    assert imports('"""See spec_decode.drafter.drafter."""\nname = "spec_decode"') == set()
