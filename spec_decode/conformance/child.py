"""The process that `spec_decode.conformance.subprocess_runner` starts: python -m ...child NAME FD REQUEST."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec
import torch


def main(name: str, writer: int, request: dict[str, Any]) -> None:
    """Plan and run the checks; the plan with its notes and each result become a line of JSON."""
    from spec_decode.conformance.runner import plan, run_check

    planned = plan(name, **{**request, "device": torch.device(request["device"])})
    _send(writer, {"report": planned.report.document(), "notes": planned.notes})
    for check, result in zip(planned.checks, planned.report.results, strict=False):
        done = msgspec.structs.replace(planned.report, results=(run_check(check, result, planned.known_failures),))
        _send(writer, {"result": done.document()["results"][0]})


def _send(writer: int, message: dict[str, Any]) -> None:
    with os.fdopen(os.dup(writer), "wb") as pipe:
        pipe.write(msgspec.json.encode(message) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), msgspec.json.decode(sys.argv[3]))
