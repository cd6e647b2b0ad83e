"""A backend that is checked in this process must not end it: with status 0 that would look like a run that passed. Nor
must it keep the process from ending."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


def running_threads() -> list[str]:
    """The threads that Python would wait for at its end, by name."""
    others = (
        each for each in threading.enumerate() if each not in (threading.main_thread(), threading.current_thread())
    )
    return [thread.name for thread in others if not thread.daemon]


def end_at_once(status: int) -> NoReturn:
    """End this process without waiting for its threads; what it printed is written."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextmanager
def refuse_process_exit() -> Iterator[None]:
    """Have `os._exit` raise RuntimeError in this process; in one that is forked from it, it ends that one as ever."""
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
