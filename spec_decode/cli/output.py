"""What the verbs print and write, and the user error that ends them."""

from __future__ import annotations

import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any

import click
from rich.console import Console
from rich.text import Text

from spec_decode.files import write_whole

_UNKNOWN_WIDTH = 160
"""Table width in columns if the output is not a terminal."""
_SECONDS_BETWEEN_LINES = 5.0
"""Interval between progress lines without a terminal."""


class UserError(click.ClickException):
    """An error that the user can fix: one line on stderr, exit status 2."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        complain(f"error: {self.message}", file)


class Terminated(KeyboardInterrupt):
    """SIGTERM: the process is asked to end, as by Ctrl-C."""


def exit_status(ended: KeyboardInterrupt) -> int:
    """Return the exit status of a verb that this interrupt ended."""
    return 143 if isinstance(ended, Terminated) else 130


@contextmanager
def interrupts() -> Iterator[Callable[[], None]]:
    """Within this context, SIGTERM raises Terminated as SIGINT raises KeyboardInterrupt, so results are kept and child
    processes ended; in a thread nothing changes. Yields a function that raises the interrupt again, because a library
    interrupted during import can swallow it."""
    received: list[KeyboardInterrupt] = []

    def raise_it(number: int, frame: object) -> None:
        received.append(Terminated() if number == signal.SIGTERM else KeyboardInterrupt())
        raise received[-1]

    def again() -> None:
        if received:
            raise received[-1]

    signals = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # in the background it can be ignored
        signals.append(signal.SIGINT)
    main_thread = threading.current_thread() is threading.main_thread()  # only this thread receives signals
    before = {number: signal.signal(number, raise_it) for number in signals if main_thread}
    try:
        yield again
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def complain(text: str, file: IO[Any] | None = None) -> None:
    """Print text of any origin as one line, on stderr unless a file is given."""
    click.echo(printable(" ".join(text.split())), file=file, err=file is None)


def stdout() -> Console:
    """Return standard output as a console; wide enough for the tables if it is not a terminal."""
    return _console(stderr=False)


def stderr() -> Console:
    """Return standard error as a console, for what is not a command's result."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    console = Console(highlight=False, stderr=stderr)
    return console if console.is_terminal else Console(highlight=False, stderr=stderr, width=_UNKNOWN_WIDTH)


def say(console: Console, text: str, style: str = "") -> None:
    """Print text of any origin without markup, control characters or line breaks."""
    console.print(Text(printable(text), style=style), soft_wrap=True)


@contextmanager
def progress(console: Console, text: str = "", *, each: bool = False) -> Iterator[Callable[[str], None]]:
    """Show progress, and yield a function that updates it: next to a spinner, or without a terminal as an occasional
    line on stderr. each: a line for every update, so the last one names what hangs."""
    if console.is_terminal:
        with console.status(Text(text)) as status:
            yield lambda text: status.update(Text(text))
        return
    shown = -math.inf

    def show(text: str) -> None:
        nonlocal shown
        if each or time.monotonic() - shown >= _SECONDS_BETWEEN_LINES:
            click.echo(text, err=True)
            shown = time.monotonic()

    if text:
        show(text)
    yield show


@contextmanager
def repeat_line(text: Callable[[], str], every: float = _SECONDS_BETWEEN_LINES) -> Iterator[None]:
    """Within this context, print a line on stderr at this interval, unless it is empty."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(every):
            if line := text():
                click.echo(line, err=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Same as `builders.errors.did_you_mean`, without torch."""
    close = get_close_matches(name, list(known), 1)
    return f" Did you mean {close[0]}?" if close else ""


def printable(text: str) -> str:
    """Spell out control characters, so that none reaches a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}. Name another path.") from error


def require_writable(target: str | Path | None) -> None:
    """Check that a file can be written before anything runs; `-` and None always can. Creates its folder.

    Raises UserError.
    """
    if target is None or str(target) == "-":
        return
    path = Path(target)
    if path.is_dir():
        raise UserError(f"{path} is a folder. Name a file.")
    with _named(path):
        folder = Path(os.path.realpath(path)).parent
        folder.mkdir(parents=True, exist_ok=True)
        if path.is_file() or not path.exists():  # not a device or a pipe
            tempfile.TemporaryFile(dir=folder).close()


def write(target: str | Path, content: str | bytes) -> None:
    """Write atomically to a path, or to standard output for `-`. Raises UserError if it cannot be written."""
    if str(target) == "-":
        click.echo(content, nl=False)
    else:
        with _named(Path(target)):
            write_whole(Path(target), content.encode() if isinstance(content, str) else content)
