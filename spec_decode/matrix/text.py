"""Text of unknown origin made safe to show in terminals, Markdown and HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Collection, Iterable, Sequence

from spec_decode.matrix.cells import Note

_SPECIAL = re.compile(r"[\\|`*\[\]~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
"""Characters that Markdown would read as markup; an underscore inside a word is not one."""


def plain_lines(text: str) -> list[str]:
    """Split a text into lines; unprintable characters, such as terminal and bidi controls, are spelled out."""
    return [
        line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
        for line in text.splitlines()
    ]


def plain(text: object) -> str:
    """The same on one line."""
    return " ".join(plain_lines(str(text)))


def markdown(text: str) -> str:
    """Escape text for a Markdown cell or list item: nothing in it is markup."""
    return "<br>".join(_SPECIAL.sub(r"\\\g<0>", html.escape(line, quote=False)) for line in plain_lines(text))


def markdown_code(text: str) -> str:
    """Make a code span that is safe for any backticks in it, and for a table cell."""
    line = plain(text).replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    pad = " " if "`" in line else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[str] = ()) -> str:
    """Make a table from cells that are already Markdown. numbers: heads of right-aligned columns."""
    rule = ["---:" if name in numbers else "---" for name in head]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *rows])


def counted(number: int, noun: str) -> str:
    """Format a number of things: 1 check, 2 checks."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def note_text(note: Note) -> str:
    """Format a note: what happened, where first, how often, and why."""
    more = f" and {note.count - 1} more" if note.count > 1 else ""
    return f"{note.outcome}: {note.check}[{note.case}]{more}: {note.reason}"
