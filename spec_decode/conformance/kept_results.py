"""Results saved as they arrive, so an interrupted run loses none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from spec_decode.conformance.report import Report, Result
from spec_decode.files import ReportError, parse_json, write_whole
from spec_decode.testing.outcome import Outcome


class KeptResults:
    """A file next to the report with one line per result, each a JSON report of one row."""

    def __init__(self, report: Path, *, resume: bool = False) -> None:
        """report: where the report will be. resume: reuse the results of an earlier run."""
        self.report, self.resume = report, resume
        self.path = report.with_name(f"{report.name}.part")

    def begin(self, planned: Report) -> dict[tuple[str, str], Result]:
        """Return the existing results by check and case. Raises ReportError if they belong to another run."""
        if self.path.exists() and not self.path.is_file():
            raise ReportError(f"results are kept in {self.path}, which is not a regular file. Move it away.")
        self._head = msgspec.structs.replace(planned, claims={}, results=())
        earlier = self._earlier() if self.resume else []
        for one in earlier:
            if why := _differences(one, planned):
                raise ReportError(
                    f"--resume needs the same backend, machine, versions and sources, but {self.report} has others: "
                    f"{why}. Omit --resume to run everything."
                )
        done = {(r.check, r.case): r for one in earlier for r in one.results if r.outcome is not Outcome.NOT_RUN}
        write_whole(self.path, b"".join(map(self._line, done.values())))
        return done

    def add(self, result: Result) -> None:
        """Append one result."""
        with self.path.open("ab") as file:
            file.write(self._line(result))

    def discard(self) -> None:
        """Remove the file once the report has everything."""
        self.path.unlink(missing_ok=True)

    def _line(self, result: Result) -> bytes:
        return msgspec.structs.replace(self._head, results=(result,)).to_json()

    def _earlier(self) -> list[Report]:
        if self.path.is_file():
            # The last line is incomplete if the process was killed while writing it.
            lines = self.path.read_bytes().splitlines(keepends=True)
            where, whole = str(self.path), [line for line in lines if line.endswith(b"\n")]
            return [Report.of(parse_json(line, where), where, sealed=True) for line in whole]
        return [Report.load(self.report)] if self.report.is_file() else []


def _differences(earlier: Report, now: Report) -> str:
    """Describe what differs between the runs; empty if results of one are valid for the other."""

    def facts(report: Report) -> dict[str, Any]:
        env = {name: value for name, value in msgspec.structs.asdict(report.env).items() if name != "date"}
        return {"backend": report.backend, "version": report.version, "contract": report.contract, **env}

    a, b = facts(earlier), facts(now)
    found = [f"{name} was {a[name]}, is {b[name]}" for name in a if a[name] != b[name]]
    return "; ".join(found + ["the sources of the checks have changed"] * (earlier.sources != now.sources))
