"""What the verbs print and write, and the error of a user that ends them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import click
from rich.console import Console
from rich.text import Text

_UNKNOWN_WIDTH = 160
"""Columns to lay tables out for where the output is no terminal."""


class UserError(click.ClickException):
    """Something the user can put right: one line on stderr, exit status 2."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"error: {' '.join(self.message.split())}", file=file, err=file is None)


def stdout() -> Console:
    """Standard output; as wide as the terminal, or wide enough for the tables where it is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_UNKNOWN_WIDTH)


def say(console: Console, text: str, style: str = "") -> None:
    """Print text as it stands: no markup in it is read, and no line of it is broken."""
    console.print(Text(text, style=style), soft_wrap=True)


def printable(text: str) -> str:
    """The text with control characters spelled out, so that none reaches a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make the file's folder. Raises UserError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(
            f"{path} must be writable, it is not: {error.strerror}; it was not written. Name another path."
        ) from error


def write(target: str, content: str) -> None:
    """Write to a path, or to standard output for `-`. Raises UserError if the file cannot be written."""
    if target == "-":
        click.echo(content, nl=False)
    else:
        with writing(Path(target)):
            Path(target).write_text(content, encoding="utf-8")
