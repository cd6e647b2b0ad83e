"""JSON, and files that others may read while they are written."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import msgspec


def json_bytes(document: Any) -> bytes:
    """JSON as this package writes it: indented, with a newline at the end."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, making its folder; whoever reads it, and an interrupt, finds the old file or the new, never a part.

    A device or a pipe is written to, not replaced. Raises OSError where folder or file cannot be written, and for a
    pipe that nobody reads, which is not waited for; what was there is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        os.set_blocking(descriptor, True)
        with open(descriptor, "wb") as special:
            special.write(content)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
