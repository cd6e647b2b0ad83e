"""Run the guide: its Python in order, its output compared, its commands parsed, its terms complete."""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path

import click
import pytest

from spec_decode.cli.main import main
from spec_decode.conformance.report import FAILURES
from spec_decode.drafter import Strategy
from spec_decode.matrix import Status
from spec_decode.testing.outcome import Outcome
from tests.docs.pages import DOCS, ROOT, blocks, shows, with_output

PAGES = [
    ROOT / "README.md",
    DOCS / "index.md",
    *sorted((DOCS / "guide").glob("*.md")),
    DOCS / "reference/recurrent-state.md",
]
EACH = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def commands() -> list[str]:
    texts = [block.text for page in PAGES for block in blocks(page) if block.info == "sh"]
    lines = [line.removeprefix(".venv/bin/") for text in texts for line in text.splitlines()]
    return [line for line in lines if line.startswith("attn-backends")]


def first_cells(page: str) -> set[str]:
    """What stands as code in the first column of the page's tables."""
    return set(re.findall(r"^\| `(\w+)` \|", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE))


@EACH
def test_page_python_runs_and_prints_shown_output(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {"__name__": page.stem}
    for block, expected in with_output(page, "output"):
        if block.info == "python":
            found = io.StringIO()
            with redirect_stdout(found):
                exec(compile(block.text, str(page), "exec"), names)
            assert shows(expected, found.getvalue()), f"the page shows\n{expected}\nand it said\n{found.getvalue()}"


@EACH
def test_every_block_is_code_command_or_output(page: Path) -> None:
    languages = [block.info for block in blocks(page)]
    assert set(languages) <= {"python", "sh", "output"}
    assert all(before == "python" for before, after in pairwise(languages) if after == "output")


@pytest.mark.parametrize("command", commands())
def test_guide_command_accepts_its_options(command: str) -> None:
    verb, *arguments = shlex.split(command, comments=True)[1:]
    assert isinstance(main, click.Group)
    main.commands[verb].make_context(verb, arguments)


def test_shown_output_must_be_complete() -> None:
    assert shows("kept ... of 4\n", "kept 3.49 of 4\n")
    assert not shows("kept ... of 4\n", "kept 3.49 of 4\nand more\n")
    assert not shows("", "anything\n")


def test_matrix_page_lists_every_status_and_outcome() -> None:
    assert {status.value for status in Status} | {outcome.value for outcome in Outcome} == first_cells(
        "guide/matrix.md"
    )


def test_matrix_page_marks_outcomes_that_fail() -> None:
    page = (DOCS / "guide" / "matrix.md").read_text(encoding="utf-8")
    marked = set(re.findall(r"^\| `(\w+)` \|.*\| yes \|$", page, re.MULTILINE)) - {status.value for status in Status}
    assert marked == {outcome.value for outcome in (*FAILURES, Outcome.NOT_RUN)}


def test_the_page_on_strategies_has_every_strategy() -> None:
    assert {strategy.value for strategy in Strategy} == first_cells("guide/strategies.md")
