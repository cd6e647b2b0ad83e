"""Files that others may read while they are written, JSON read with care, and reports that carry their own digest."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

SEAL = "digest"
"""The field of a report that holds the digest of all others."""


class ReportError(ValueError):
    """A file that is not a report of this schema, or was edited; the message says what is wrong with it."""


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


def report_bytes(document: dict[str, Any]) -> bytes:
    """The report as a file holds it: sealed, without indentation, with a newline at the end."""
    return msgspec.json.encode(sealed(document)) + b"\n"


def sealed(document: dict[str, Any]) -> dict[str, Any]:
    """The report with the digest of everything else in it."""
    return {**document, SEAL: _digest(document)}


def require_unedited(document: Any, where: str) -> None:
    """Raise ReportError for a report whose digest is missing or does not fit. JSON without a schema passes."""
    if isinstance(document, dict) and "schema" in document and document.get(SEAL) != _digest(document):
        raise ReportError(
            f"{where} was changed after it was written: its digest does not fit. Run the command that made it again."
        )


def read_json(path: str | os.PathLike[str]) -> Any:
    """What a JSON file holds. Raises ReportError where it cannot be read, is no whole JSON, or says one thing twice. A
    pipe or a device is not waited for.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ReportError(f"{path} is no regular file. Name a report, or a folder of reports.")
        return parse_json(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}. Check the path.") from error


def parse_json(content: bytes, where: str) -> Any:
    """The JSON in some bytes; raises ReportError for what is no whole JSON or says one thing twice."""
    try:
        document = msgspec.json.decode(content)
        # The decoder keeps the last of two equal keys, and nobody would know of the first.
        json.loads(content, object_pairs_hook=_require_unique)
        return document
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{where} is not whole JSON: {error}. Run the command that made it again.") from error


def json_number(value: float) -> float | str:
    """The value, or its name where JSON has no number for it."""
    return value if math.isfinite(value) else str(float(value))


def _digest(document: dict[str, Any]) -> str:
    rest = {key: value for key, value in document.items() if key != SEAL}
    return hashlib.sha256(msgspec.json.encode(rest, order="sorted")).hexdigest()[:16]


def _require_unique(pairs: list[tuple[str, Any]]) -> None:
    if twice := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
        raise ValueError(f"the key {twice[0]!r} stands twice in one object")
