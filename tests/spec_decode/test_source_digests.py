"""A digest changes with what the source does, and with nothing else; each kind of report covers what it runs."""

from __future__ import annotations

import pytest

from spec_decode import source_digests
from spec_decode.source_digests import CHECKS, ROUNDS, SERVING, SOAKS, changed_since, syntax_of
from tests.import_graph import module_files, uses_here

# In one process with test_floors.py: the sources are parsed once.
pytestmark = pytest.mark.xdist_group("import_graph")

SOURCE = '''"""A module."""
import math

class Config:
    """A class."""

    size: int = 3
    """A field."""

def area(r):
    """An area."""
    # By the book.
    return math.pi * r**2
'''


@pytest.mark.parametrize(
    "old, new",
    [
        ("# By the book.", "# Otherwise."),
        ('"""An area."""', '"""The area of a circle, in any unit."""'),
        ('    """A field."""\n', ""),
        ("r**2", "r ** 2  # squared"),
        ("import math", "\n\nimport math"),
    ],
)
def test_comments_docstrings_and_layout_do_not_count(old: str, new: str) -> None:
    assert old in SOURCE
    assert syntax_of(SOURCE.encode()) == syntax_of(SOURCE.replace(old, new).encode())


@pytest.mark.parametrize("old, new", [("r**2", "r**3"), ("size: int", "length: int"), ("= 3", "= 3.0"), ("pi", "tau")])
def test_anything_that_runs_counts(old: str, new: str) -> None:
    assert syntax_of(SOURCE.encode()) != syntax_of(SOURCE.replace(old, new).encode())


def test_text_that_a_program_uses_counts() -> None:
    assert syntax_of(b"x = 'a'") != syntax_of(b"x = 'b'")
    assert syntax_of(b"x = f'{y:>{n}}a'") != syntax_of(b"x = f'{y:>{n}}b'")


def test_a_package_has_changed_when_a_file_of_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(source_digests, "_ROOT", tmp_path)
    (tmp_path / "room" / "inner").mkdir(parents=True)
    file = tmp_path / "room" / "inner" / "kernel.py"
    file.write_text(SOURCE)
    source_digests._digest.cache_clear()
    taken = source_digests.source_digests(["room"])
    assert changed_since(taken) == []
    file.write_text(SOURCE.replace("r**2", "r**3"))
    source_digests._digest.cache_clear()
    assert changed_since(taken) == ["room"]
    source_digests._digest.cache_clear()


def test_a_package_that_is_no_more_has_changed() -> None:
    assert changed_since({"spec_decode.nonesuch": "0" * 16}) == ["spec_decode.nonesuch"]


@pytest.mark.parametrize(
    "start, covered",
    [
        ("spec_decode.conformance", CHECKS),
        ("spec_decode.tools.bench.cases.backend_rounds", ROUNDS),
        ("spec_decode.tools.bench.cases.draft_rounds", ROUNDS),
        ("spec_decode.tools.bench.cases.decode", ROUNDS),
        ("spec_decode.tools.bench.cases.sampling", ROUNDS),
        ("spec_decode.tools.bench.cases.throughput", SERVING),
        ("spec_decode.tools.soak.runner", SOAKS),
        ("spec_decode.engine", SERVING),
    ],
)
def test_a_report_covers_every_package_that_what_makes_it_uses(start: str, covered: tuple[str, ...]) -> None:
    files, uses = module_files(), uses_here()
    todo = [module for module in files if module == start or module.startswith(f"{start}.")]
    seen: set[str] = set()
    while todo:
        seen.add(module := todo.pop())
        todo += uses[module] - seen
    # Of the tools what times counts for nothing; the root of spec_decode has no kernels and no metadata.
    found = {module for module in seen if not module.startswith("spec_decode.tools.") and module.count(".") != 1}
    assert not {module for module in found if not module.startswith(tuple(f"{package}." for package in covered))}
