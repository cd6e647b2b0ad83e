"""Files replaced atomically, JSON read strictly, and reports that carry their own digest.

``python -m spec_decode.files FILE`` prints a report with its tables expanded to rows.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from spec_decode.report_tables import MalformedTable, Tables, indices, packed, runs, unpacked

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
    """Encode a report: sealed, lists of objects as tables, source parts as runs, no indentation, one final newline.

    The seal covers the document, independent of how its rows and indices are encoded.
    """
    written = {name: _as_table(value) for name, value in sealed(document).items()}
    return msgspec.json.encode(_with_parts(written, list | tuple, runs)) + b"\n"


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
    """Read a JSON file, with its tables as lists of objects.

    Raises ReportError if it cannot be read, is not complete JSON, repeats a key or has a malformed table. A pipe or a
    device raises too, without waiting for it.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ReportError(f"{path} is not a regular file. Name a report, or a folder of reports.")
        return parse_json(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}. Check the path.") from error


def parse_json(content: bytes, where: str) -> Any:
    """Parse JSON from bytes, with its tables as lists of objects. Raises ReportError if it is not complete JSON,
    repeats a key or has a malformed table."""
    try:
        document = msgspec.json.decode(content)
        # The decoder silently keeps the last of two equal keys.
        json.loads(content, object_pairs_hook=_require_unique)
        if isinstance(document, dict):
            document = {name: unpacked(value) if _is_table(value) else value for name, value in document.items()}
            document = _with_parts(document, str, indices)
        return document
    except MalformedTable as error:
        raise ReportError(
            f"{where} has a malformed table or index: {error}. Run the command that made it again."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{where} is not valid JSON: {error}. Run the command that made it again.") from error


def json_number(value: float) -> float | str:
    """Return the value, or its name if JSON has no number for it."""
    return value if math.isfinite(value) else str(float(value))


def _as_table(value: Any) -> Any:
    rows = isinstance(value, (list, tuple)) and value and all(isinstance(row, dict) for row in value)
    return packed(value) if rows else value


def _with_parts(document: dict[str, Any], kind: Any, change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the document with `change` applied to every source part of type `kind`."""
    sources = document.get("sources")
    if not (isinstance(sources, dict) and isinstance(sources.get("parts"), dict)):
        return document
    parts = {name: change(part) if isinstance(part, kind) else part for name, part in sources["parts"].items()}
    return {**document, "sources": {**sources, "parts": parts}}


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == set(Tables.__struct_fields__)


def _digest(document: dict[str, Any]) -> str:
    rest = {key: value for key, value in document.items() if key != SEAL}
    return hashlib.sha256(msgspec.json.encode(rest, order="sorted")).hexdigest()[:16]


def _require_unique(pairs: list[tuple[str, Any]]) -> None:
    if twice := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
        raise ValueError(f"the key {twice[0]!r} occurs twice in one object")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"error: expected one FILE, got {len(sys.argv) - 1}. Run python -m spec_decode.files FILE.")
    try:
        document = read_json(sys.argv[1])
    except ReportError as error:
        sys.exit(f"error: {error}")
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
