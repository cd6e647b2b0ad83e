"""Progress bars on stderr while a large model is read, and while many prompts run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

_SECONDS = 0.1
"""Interval between two updates."""
_LARGE = 1 << 30
"""Bytes of a model that take long enough to read."""


@contextmanager
def progress_bar(total: int, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows how many of the prompts are done and how many tokens are new.

    It shows nothing if `shown` is False, for a single prompt, and if stderr is not a terminal.
    """
    if not shown or total < 2 or not sys.stderr.isatty():
        yield lambda done, tokens: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    columns = (MofNCompleteColumn(), TextColumn("prompts"), BarColumn(), TextColumn("{task.description}"))
    with _bar(*columns) as bar:
        task, started, is_due = bar.add_task("", total=total), time.monotonic(), _interval()

        def show(done: int, tokens: int) -> None:
            if done == total or is_due():
                speed = tokens / max(time.monotonic() - started, 1e-9)
                bar.update(task, completed=done, description=f"{tokens} tokens, {speed:.0f} a second", refresh=True)

        yield show


@contextmanager
def loading_bar(total: int, *, shown: bool) -> Iterator[Callable[[int], None] | None]:
    """Yield a function that shows how many of the bytes of a model's files are read, told of each part's.

    None, and nothing is shown, if `shown` is False, for a small model, and if stderr is not a terminal.
    """
    if not shown or total < _LARGE or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

    with _bar(TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn()) as bar:
        task, is_due = bar.add_task("", total=total), _interval()
        yield lambda count: bar.update(task, advance=count, refresh=is_due())
        # The files also hold headers.
        bar.update(task, completed=total, refresh=True)


def _bar(*columns: ProgressColumn) -> Progress:
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    # Without a thread, which would compete with the engine for the interpreter.
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), auto_refresh=False)


def _interval() -> Callable[[], bool]:
    """Return a function that tells whether it is time for another update."""
    last = 0.0

    def is_due() -> bool:
        nonlocal last
        now = time.monotonic()
        if now - last < _SECONDS:
            return False
        last = now
        return True

    return is_due
