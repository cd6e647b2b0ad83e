"""Write a script's report, with its provenance."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from spec_decode.environment import environment
from spec_decode.files import report_bytes, write_whole
from spec_decode.source_digests import SourceRecord, backend_modules


def write_report(
    path: Path,
    schema: str,
    device: torch.device,
    roots: Sequence[str],
    *,
    backends: Sequence[str] = (),
    command: Sequence[str] | None = None,
    **content: Any,
) -> None:
    """Write the schema, environment, command (without the report's own path), the digests of the source behind the
    report, and then the content.

    roots, backends: the modules and registered backends under test. command: Python's arguments; this process's if
    omitted.
    """
    given = [each for each in (command or sys.argv) if not each.startswith("--json=")]
    if "--json" in given:
        at = given.index("--json")
        del given[at : at + 2]
    sources = SourceRecord.of({"": [*roots, *backend_modules(backends)]})
    head = {
        "schema": schema,
        "env": environment(device),
        "command": shlex.join(["python", *given, "--json", "FILE"]),
        "sources": sources,
    }
    write_whole(path, report_bytes(msgspec.to_builtins({**head, **content})))
