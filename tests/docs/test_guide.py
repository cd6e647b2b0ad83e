"""The guide is run, not trusted: its Python in order, its output compared, its commands parsed, its words complete."""

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

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "index.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[tuple[str, str]]:
    return [(match["language"], match["text"]) for match in _FENCE.finditer(page.read_text(encoding="utf-8"))]


def commands() -> list[str]:
    texts = [text for page in PAGES for language, text in blocks(page) if language == "sh"]
    return [line for text in texts for line in text.splitlines() if line.startswith("attn-backends")]


def first_cells(page: str) -> set[str]:
    """What stands as code in the first column of the page's tables."""
    return set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE))


def shows(wanted: str, found: str) -> bool:
    """Whether the output is the one on the page, "..." standing for anything within a line."""
    return re.fullmatch(".*".join(map(re.escape, wanted.split("..."))), found) is not None


_RUN = [pytest.param(page, id=page.stem) for page in PAGES]


@pytest.mark.parametrize("page", _RUN)
def test_the_python_of_a_page_runs_and_says_what_the_page_shows(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {"__name__": page.stem}
    following = [*blocks(page)[1:], ("", "")]
    for (language, text), (next_language, wanted) in zip(blocks(page), following, strict=True):
        if language == "python":
            found = io.StringIO()
            with redirect_stdout(found):
                exec(compile(text, str(page), "exec"), names)
            expected = wanted if next_language == "output" else ""
            assert shows(expected, found.getvalue()), f"the page shows\n{expected}\nand it said\n{found.getvalue()}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_a_page_is_code_a_command_or_the_output_of_the_code_above(page: Path) -> None:
    languages = [language for language, _ in blocks(page)]
    assert set(languages) <= {"python", "sh", "output"}
    assert all(before == "python" for before, after in pairwise(languages) if after == "output")


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_guide_has_the_options_it_is_given(command: str) -> None:
    verb, *arguments = shlex.split(command, comments=True)[1:]
    assert isinstance(main, click.Group)
    main.commands[verb].make_context(verb, arguments)


def test_an_output_must_be_whole() -> None:
    assert shows("kept ... of 4\n", "kept 3.49 of 4\n")
    assert not shows("kept ... of 4\n", "kept 3.49 of 4\nand more\n")
    assert not shows("", "anything\n")


def test_the_page_on_the_matrix_has_every_status_and_outcome() -> None:
    assert {status.value for status in Status} | {outcome.value for outcome in Outcome} == first_cells(
        "guide/matrix.md"
    )


def test_the_page_on_the_matrix_says_which_outcomes_fail_a_report() -> None:
    page = (ROOT / "docs" / "guide" / "matrix.md").read_text(encoding="utf-8")
    said = set(re.findall(r"^\| `(\w+)` \|.*\| yes \|$", page, re.MULTILINE)) - {status.value for status in Status}
    assert said == {outcome.value for outcome in (*FAILURES, Outcome.NOT_RUN)}


def test_the_page_on_strategies_has_every_strategy() -> None:
    assert {strategy.value for strategy in Strategy} == first_cells("guide/strategies.md")
