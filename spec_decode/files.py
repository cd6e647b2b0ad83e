"""Files replaced atomically, JSON read strictly, and reports that carry their own digest."""

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
"""The report field that holds the digest of all other fields."""


class ReportError(ValueError):
    """A file that is not a report of this schema, or was edited; the message says what is wrong."""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically, creating its folder: readers never see a partial file, nor do interrupts leave one.

    A device or pipe is written to, not replaced; for a symlink, the target file is replaced. Raises OSError, with the
    old content intact, if the folder or file cannot be written, or at once for a pipe without a reader.
    """
    if path.exists() and not path.is_file():
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        os.set_blocking(descriptor, True)
        with open(descriptor, "wb") as special:
            special.write(content)
        return
    path = Path(os.path.realpath(path))  # of /dev/stdout the file that it leads to: root could replace the link
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def report_bytes(document: dict[str, Any]) -> bytes:
    """Encode a sealed report as plain JSON in one line."""
    return msgspec.json.encode(sealed(document)) + b"\n"


def sealed(document: dict[str, Any]) -> dict[str, Any]:
    """Return the report with the digest of everything else in it."""
    return {**document, SEAL: _digest(document)}


def require_unedited(document: Any, where: str) -> None:
    """Raise ReportError for a report with a missing or wrong digest. JSON without a schema passes."""
    if isinstance(document, dict) and "schema" in document and document.get(SEAL) != _digest(document):
        raise ReportError(
            f"{where} was changed after it was written: its digest does not match. Run the command that made it again."
        )


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file.

    Raises ReportError if it cannot be read, is not complete JSON or repeats a key. A pipe or a device raises too,
    without waiting for it.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ReportError(f"{path} is not a regular file. Name a report, or a folder of reports.")
        return parse_json(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}. Check the path.") from error


def parse_json(content: bytes, where: str) -> Any:
    """Parse JSON from bytes. Raises ReportError if it is not complete JSON or repeats a key."""
    try:
        document = msgspec.json.decode(content)
        # The decoder silently keeps the last of two equal keys.
        json.loads(content, object_pairs_hook=_require_unique)
        return document
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{where} is not valid JSON: {error}. Run the command that made it again.") from error


def json_number(value: float) -> float | str:
    """Return the value, or its name if JSON has no number for it."""
    return value if math.isfinite(value) else str(float(value))


def _digest(document: dict[str, Any]) -> str:
    rest = {key: value for key, value in document.items() if key != SEAL}
    return hashlib.sha256(msgspec.json.encode(rest, order="sorted")).hexdigest()[:16]


def _require_unique(pairs: list[tuple[str, Any]]) -> None:
    if twice := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
        raise ValueError(f"the key {twice[0]!r} occurs twice in one object")
