"""Follow docs/adding-a-backend.md as a new user: write its files, run its commands, compare its outputs."""

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
from tests.docs.pages import DOCS, ROOT, blocks, shows, with_output
from tests.examples.stranger import Stranger

PAGE = DOCS / "adding-a-backend.md"
TEXT = PAGE.read_text()
CONTRACT = (DOCS / "reference" / "backend-contract.md").read_text()
FILES = {block.path: block.text for block in blocks(PAGE) if block.path}
"""The text of each file that the page shows, by the path above it."""


@dataclass(frozen=True)
class Command:
    """A block of shell, the status it must end with, and the lines of the output shown below it."""

    text: str
    status: int
    slow: bool
    output: tuple[str, ...]


def commands() -> Iterator[Command]:
    for block, output in with_output(PAGE, "text"):
        language, *options = block.info.split()[:2] or [""]
        if language == "sh":
            yield Command(block.text, int("exit=1" in options), "slow" in options, tuple(output.splitlines()))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> tuple[Stranger, Path]:
    """Someone who has written every file of the page, and installed nothing yet."""
    work = tmp_path_factory.mktemp("work")
    for name, text in FILES.items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Stranger.arrive(tmp_path_factory.mktemp("environment")), work


def run(stranger: tuple[Stranger, Path], command: Command) -> None:
    environment, work = stranger
    output = environment.must(command.text, work, status=command.status)
    printed = [line.rstrip() for line in output.splitlines()]
    missing = [line for line in command.output if not any(shows(line, found) for found in printed)]
    assert not missing, f"the page shows {missing}, and\n$ {command.text}\nsaid\n{output}"


@pytest.mark.parametrize("name", FILES)
def test_page_block_matches_example_file(name: str) -> None:
    assert FILES[name] == (ROOT / "examples" / name).read_text(), f"put examples/{name} into the page"


def test_page_shows_every_file_of_its_backends() -> None:
    folders = ("window_pages", "window_pages_liar", "window_pages_planned")
    written = {path for folder in folders for path in (ROOT / "examples" / folder).rglob("*.py")}
    assert {path.relative_to(ROOT / "examples").as_posix() for path in written} <= FILES.keys()


def test_every_block_is_file_command_output_or_drawing() -> None:
    assert {block.info.partition(" ")[0] for block in blocks(PAGE) if not block.path} <= {"", "sh", "text"}


def test_the_page_links_to_its_own_headings() -> None:
    headings = {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", TEXT, re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= headings


def test_contract_names_every_field_and_feature() -> None:
    named = set(re.findall(r"`(\w+)[`(]", CONTRACT))
    records = (AttentionBatch, AttentionSpec, Capabilities)
    fields = {field.name for kind in records for field in dataclasses.fields(kind)}
    assert fields | {feature.name for feature in Feature} <= named


def test_contract_shows_signature_of_sizes() -> None:
    signature = inspect.signature(Sizes)
    shown = re.search(r"`Sizes\((minimum.*?)\)`", CONTRACT)
    assert shown and shown[1] == ", ".join(f"{name}={p.default}" for name, p in signature.parameters.items())


def test_the_page_names_every_family_in_order() -> None:
    *families, last = FAMILIES
    assert f"{', '.join(families)} and {last}" in " ".join(TEXT.split())


@pytest.mark.slow
def test_page_commands_run_in_order(stranger: tuple[Stranger, Path]) -> None:
    """In order, from an empty folder: about half a minute, most of it for starting Python."""
    for command in commands():
        if not command.slow:
            run(stranger, command)


@pytest.mark.slow
@pytest.mark.long
def test_slow_page_commands_run(stranger: tuple[Stranger, Path]) -> None:
    """Every check of the kit on the page's backend: about a minute."""
    environment, work = stranger
    environment.must("pip install -e ./window_pages", work)
    for command in commands():
        if command.slow:
            run(stranger, command)
