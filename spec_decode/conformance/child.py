"""The process started by `spec_decode.conformance.subprocess_runner`, with the arguments NAME FD REQUEST."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from spec_decode.testing.interpreter import interpret_kernels_on
from spec_decode.testing.process_exit import end_at_once, running_threads

if TYPE_CHECKING:
    from spec_decode.conformance.report import Result


def main(name: str, writer: int, request: dict[str, Any]) -> None:
    """List and run the checks; send the empty report, each note and each result as a line of JSON."""
    from spec_decode.conformance.drawn_cases import drawn_from
    from spec_decode.conformance.kept_results import KeptResults
    from spec_decode.conformance.runner import check_list, run
    from spec_decode.conformance.soak_checks import soak_length
    from spec_decode.files import ReportError
    from spec_decode.source_digests import SourceRecord

    device = torch.device(request["device"])
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpret_kernels_on(device)
    keep = request.pop("keep", None)
    with soak_length(**request.pop("soak", {})), drawn_from(request.pop("seed", 0)):
        listed = check_list(name, **{**request, "device": device})
    _send(writer, {"report": listed.report.document()})
    head = msgspec.structs.replace(listed.report, sources=SourceRecord(), claims={}, results=())

    def on_result(result: Result) -> None:
        if listed.checks:  # otherwise the report already holds the only result
            _send(writer, {"result": msgspec.structs.replace(head, results=(result,)).document()})

    kept = KeptResults(Path(keep["report"]), resume=keep["resume"]) if keep else None
    try:
        run(listed, on_result=on_result, on_note=lambda note: _send(writer, {"notes": [note]}), kept=kept)
    except ReportError as error:
        _send(writer, {"refused": str(error)})
    if threads := ", ".join(running_threads()):
        why = f"still running after the last check: {threads}. A program that loads the backend would never exit"
        _send(writer, {"notes": [f"{why}: stop them, or make them daemons."]})
        end_at_once(0)


def _send(writer: int, message: dict[str, Any]) -> None:
    with os.fdopen(os.dup(writer), "wb") as pipe:
        pipe.write(msgspec.json.encode(message) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), msgspec.json.decode(sys.argv[3]))
