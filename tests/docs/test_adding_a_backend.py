"""docs/adding-a-backend.md is walked by a stranger: its files are written, its commands run, its outputs seen."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from attn_backends import Capabilities, Feature, Sizes
from builders import AttentionBatch, AttentionSpec
from spec_decode.conformance.coverage import FAMILIES
from tests.examples.stranger import Stranger

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding-a-backend.md").read_text()
CONTRACT = (ROOT / "docs" / "reference" / "backend-contract.md").read_text()
_FENCE = re.compile(
    r"(?:^`(?P<path>[^`\n]+)`:\n\n)?^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Command:
    """A block of shell, the status it must end with, and the lines of the output shown below it."""

    text: str
    status: int
    slow: bool
    output: tuple[str, ...]


def blocks() -> list[tuple[str, str]]:
    return [(match["info"], match["text"]) for match in _FENCE.finditer(PAGE)]


def files() -> dict[str, str]:
    """The text of each file that the page shows, by the path above it."""
    return {match["path"]: match["text"] for match in _FENCE.finditer(PAGE) if match["path"]}


def commands() -> Iterator[Command]:
    following = [*blocks()[1:], ("", "")]
    for (info, text), (next_info, output) in zip(blocks(), following, strict=True):
        language, *options = info.split()[:2] or [""]
        if language == "sh":
            lines = output.splitlines() if next_info == "text" else []
            yield Command(text, 1 if "exit=1" in options else 0, "slow" in options, tuple(lines))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> tuple[Stranger, Path]:
    """Someone who has written every file of the page, and installed nothing yet."""
    work = tmp_path_factory.mktemp("work")
    for name, text in files().items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Stranger.arrive(tmp_path_factory.mktemp("environment")), work


def shows(output: str, line: str) -> bool:
    """Whether the output has this line, "..." standing for anything."""
    pattern = ".*".join(re.escape(part) for part in line.split("..."))
    return any(re.fullmatch(pattern, found.rstrip()) for found in output.splitlines())


def run(stranger: tuple[Stranger, Path], command: Command) -> None:
    environment, work = stranger
    output = environment.must(command.text, work, status=command.status)
    missing = [line for line in command.output if not shows(output, line)]
    assert not missing, f"the page shows {missing}, and\n$ {command.text}\nsaid\n{output}"


@pytest.mark.parametrize("name", files())
def test_a_block_below_a_path_is_that_example(name: str) -> None:
    assert files()[name] == (ROOT / "examples" / name).read_text(), f"put examples/{name} into the page"


def test_the_page_shows_every_file_of_its_backends() -> None:
    folders = ("window_pages", "window_pages_liar", "window_pages_planned")
    written = {path for folder in folders for path in (ROOT / "examples" / folder).rglob("*.py")}
    assert {path.relative_to(ROOT / "examples").as_posix() for path in written} <= files().keys()


def test_every_block_is_a_file_a_command_an_output_or_a_drawing() -> None:
    others = [match["info"].split()[:1] for match in _FENCE.finditer(PAGE) if not match["path"]]
    assert all(language in ([], ["sh"], ["text"]) for language in others)


def test_the_page_links_to_its_own_headings() -> None:
    headings = {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", PAGE, re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= headings


def test_the_contract_names_all_that_a_batch_a_spec_and_a_record_of_capabilities_hold() -> None:
    named = set(re.findall(r"`(\w+)[`(]", CONTRACT))
    records = (AttentionBatch, AttentionSpec, Capabilities)
    held = {field.name for kind in records for field in dataclasses.fields(kind)}
    assert held | {feature.name for feature in Feature} <= named


def test_the_contract_shows_sizes_as_they_are_made() -> None:
    signature = inspect.signature(Sizes)
    shown = re.search(r"`Sizes\((minimum.*?)\)`", CONTRACT)
    assert shown and shown[1] == ", ".join(f"{name}={p.default}" for name, p in signature.parameters.items())


def test_the_page_names_every_family_in_order() -> None:
    *families, last = FAMILIES
    assert f"{', '.join(families)} and {last}" in " ".join(PAGE.split())


@pytest.mark.slow
def test_the_page_can_be_walked(stranger: tuple[Stranger, Path]) -> None:
    """In order, from an empty folder: about half a minute, most of it for starting Python."""
    for command in commands():
        if not command.slow:
            run(stranger, command)


@pytest.mark.slow
def test_the_slow_commands_of_the_page(stranger: tuple[Stranger, Path]) -> None:
    """Every check of the kit on the page's backend: about a minute."""
    environment, work = stranger
    environment.must("pip install -e ./window_pages", work)
    for command in commands():
        if command.slow:
            run(stranger, command)
