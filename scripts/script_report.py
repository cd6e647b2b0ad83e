"""What the scripts share: options for the device and the report, and a report with its provenance."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from spec_decode.environment import environment
from spec_decode.files import write_whole
from spec_decode.source_digests import SERVING, source_digests


def script_options(description: str | None) -> argparse.ArgumentParser:
    """A parser with --device and --json."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--json", type=Path, required=True, help="file of the report")
    return parser


def write_report(
    path: Path, schema: str, device: torch.device, covers: Sequence[str] = SERVING, **content: Any
) -> None:
    """Write schema, environment, command, which leaves the report's own path out, the digests of the source that the
    report covers, and then the content."""
    arguments = sys.argv[1:]
    if "--json" in arguments:
        at = arguments.index("--json")
        del arguments[at : at + 2]
    command = shlex.join(["python", sys.argv[0], *arguments, "--json", "FILE"])
    env = msgspec.to_builtins(environment(device))
    head = {"schema": schema, "env": env, "command": command, "sources": source_digests(covers)}
    write_whole(path, (json.dumps({**head, **content}, indent=1) + "\n").encode())
