"""The blocks of a page, and whether an output is the one that the page shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_FENCE = re.compile(
    r"(?:^`(?P<path>[^`\n]+)`:\n\n)?^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)


class Block(NamedTuple):
    """info: its language and more. path: of the file it contains, as written above it; empty for other blocks."""

    info: str
    text: str
    path: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(match["info"], match["text"], match["path"] or "") for match in _FENCE.finditer(text)]


def with_output(page: Path, language: str) -> Iterator[tuple[Block, str]]:
    """Yield each block with the text of the next if that has this language: the output of its code or commands."""
    found = blocks(page)
    for block, after in zip_longest(found, found[1:]):
        yield block, after.text if after and after.info == language else ""


def shows(wanted: str, found: str) -> bool:
    """Return whether the output is the one on the page, where "..." matches anything within a line."""
    return re.fullmatch(".*".join(map(re.escape, wanted.split("..."))), found) is not None
