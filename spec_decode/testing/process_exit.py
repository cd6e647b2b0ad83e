"""A backend that is checked in this process must not end it: with status 0 that would look like a run that passed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


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
