"""Where a report of these scripts comes from."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import msgspec
import torch

from spec_decode.environment import environment


def provenance(schema: str, device: torch.device) -> dict[str, Any]:
    """Schema, machine, commit and the command that repeats it; where the report goes is no part of that."""
    words = sys.argv[1:]
    if "--json" in words:
        at = words.index("--json")
        words = words[:at] + words[at + 2 :]
    command = shlex.join(["python", sys.argv[0], *words, "--json", "FILE"])
    return {"schema": schema, "env": msgspec.to_builtins(environment(device)), "command": command}
