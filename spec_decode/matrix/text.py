"""Text of unknown origin made safe to show, and how counts, notes and ages are put in words."""

from __future__ import annotations

from collections.abc import Sequence

from spec_decode.matrix.cells import Note


def plain_lines(text: str) -> list[str]:
    """Split a text into lines; unprintable characters, such as terminal and bidi controls, are spelled out."""
    return [
        line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
        for line in text.splitlines()
    ]


def plain(text: object) -> str:
    """The same on one line."""
    return " ".join(plain_lines(str(text)))


def counted(number: int, noun: str) -> str:
    """Format a number of things: 1 check, 2 checks."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def age_text(changed: Sequence[str]) -> str:
    """Say that the source was older; empty if it was not."""
    return f"from older source ({counted(len(changed), 'file')} changed)" if changed else ""


def note_text(note: Note) -> str:
    """Format a note: what happened, where first, how often, and why."""
    more = f" and {note.count - 1} more" if note.count > 1 else ""
    return f"{note.outcome}: {note.check}[{note.case}]{more}: {note.reason}"
