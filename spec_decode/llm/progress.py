"""A progress bar on stderr while many prompts run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SECONDS = 0.1
"""Interval between two updates."""


@contextmanager
def progress_bar(total: int, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows how many of the prompts are done and how many tokens are new.

    It shows nothing if `shown` is False, for a single prompt, and if stderr is not a terminal.
    """
    if not shown or total < 2 or not sys.stderr.isatty():
        yield lambda done, tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (MofNCompleteColumn(), TextColumn("prompts"), BarColumn(), TextColumn("{task.description}"))
    # Without a thread, which would compete with the engine for the interpreter.
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), auto_refresh=False) as bar:
        task, started, last = bar.add_task("", total=total), time.monotonic(), 0.0

        def show(done: int, tokens: int) -> None:
            nonlocal last
            now = time.monotonic()
            if done < total and now - last < _SECONDS:
                return
            last = now
            speed = tokens / max(now - started, 1e-9)
            bar.update(task, completed=done, description=f"{tokens} tokens, {speed:.0f} a second", refresh=True)

        yield show
