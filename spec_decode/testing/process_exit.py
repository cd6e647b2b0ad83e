"""Keep a checked backend from ending this process, which with status 0 would look like a passing run, and from keeping
it from ending."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


def running_threads() -> list[str]:
    """Return the names of the threads that Python would join at exit."""
    others = (
        each for each in threading.enumerate() if each not in (threading.main_thread(), threading.current_thread())
    )
    return [thread.name for thread in others if not thread.daemon]


def end_at_once(status: int) -> NoReturn:
    """End this process without joining its threads; its output is flushed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextmanager
def refuse_process_exit() -> Iterator[None]:
    """Make `os._exit` raise RuntimeError in this process; a process forked from it still ends."""
    exit_at_once, here = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != here:
            exit_at_once(status)
        raise RuntimeError(f"os._exit({status}) would end the process that checks the backend. Raise an error instead.")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = exit_at_once
