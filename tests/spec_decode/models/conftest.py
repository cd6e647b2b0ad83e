from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest


@pytest.fixture
def pipe() -> Iterator[Callable[..., None]]:
    """Turn a path into a pipe; its reader gets an empty object, or the given content."""
    pipes: list[tuple[Path, Thread]] = []

    def write(path: Path, content: bytes) -> None:
        with suppress(BrokenPipeError):
            path.write_bytes(content)

    def make(path: Path, content: bytes = b"{}") -> None:
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        writer = Thread(target=write, args=[path, content], daemon=True)
        writer.start()
        pipes.append((path, writer))

    yield make
    for path, writer in pipes:
        # Opening it for reading releases a writer that nobody read from.
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        writer.join()
        os.close(reader)
