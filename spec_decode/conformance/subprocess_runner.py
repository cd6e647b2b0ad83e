"""Check a backend in its own process: a crash or hang is named and costs no other backend its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from spec_decode.conformance.report import Report, Result
from spec_decode.conformance.runner import unloaded
from spec_decode.environment import Environment
from spec_decode.files import ReportError
from spec_decode.testing.outcome import Outcome
from spec_decode.testing.process_isolation import ProcessEnded, TimeLimit, python_module, start_isolated

_CHILD = "spec_decode.conformance.child"


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLimits:
    """Time limits in seconds for one check and for all checks of a backend. Loading the backend counts as a check."""

    check: float = 600.0
    backend: float = 7200.0


def check_isolated(
    name: str,
    *,
    env: Environment,
    request: dict[str, Any],
    limits: TimeLimits | None = None,
    on_result: Callable[[Result], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    child: Sequence[str] | None = None,
) -> Report:
    """`check_backend` in another process; always returns a complete report.

    request: the keyword arguments of `spec_decode.conformance.runner.check_list`, the device by name, "soak": those of
    `soak_length`, "seed": of the drawn cases, and "keep": {"report": path, "resume": bool} for `KeptResults`; raises
    ReportError if those results belong to another run. If the process dies or exceeds a limit, the check in flight
    becomes an `error` with the reason, and later ones stay `not_run`. env: used until the process reports its own.
    """
    limits = limits or TimeLimits()
    check_limit, backend_limit = TimeLimit(limits.check, "a check"), TimeLimit(limits.backend, "a backend")
    unknown = unloaded(name, env, str(request.get("command", "")), Outcome.NOT_RUN)
    progress = _Progress(unknown, on_result, on_note)
    with start_isolated([*(child or python_module(_CHILD)), name], request) as process:
        try:
            for message in process.messages(check_limit, backend_limit):
                progress.take(message)
            progress.require_complete(process.status())
        except ProcessEnded as ended:
            progress.stop(f"{ended}{process.printed_tail()}")
    return progress.report


class _Progress:
    """The report, as far as the process's messages have filled it."""

    def __init__(
        self, report: Report, on_result: Callable[[Result], None] | None, on_note: Callable[[str], None] | None
    ) -> None:
        self.report, self._on_result, self._on_note = report, on_result, on_note
        self._results, self._at = list(report.results), 0

    def take(self, message: dict[str, Any]) -> None:
        """Handle {"report": the empty one}, {"result": the next}, {"notes": texts} or {"refused": why}."""
        if self._on_note:
            for note in message.get("notes", ()):
                self._on_note(note)
        if "refused" in message:
            raise ReportError(message["refused"])
        if "report" in message:
            self.report = Report.of(message["report"], "the process")
            self._results, self._at = list(self.report.results), 0
            if self._results and self._results[0].outcome is not Outcome.NOT_RUN:
                self._record(self._results[0])
        elif "result" in message:
            self._record(Report.of(message["result"], "the process").results[0])

    def _record(self, result: Result) -> None:
        self._results[self._at] = result
        self._at += 1
        self.report = msgspec.structs.replace(self.report, results=tuple(self._results))
        if self._on_result:
            self._on_result(result)

    def require_complete(self, status: str) -> None:
        if status or self._at < len(self._results):
            raise ProcessEnded(f"the process ended with {status or 'exit status 0'}")

    def stop(self, why: str) -> None:
        """Blame the check in flight, or the last one if all were done; none if there were no checks."""
        if not self._results:
            return
        at = min(self._at, len(self._results) - 1)
        after = f"{self._results[at].check}[{self._results[at].case}] ended the process"
        self._results[at + 1 :] = [msgspec.structs.replace(r, reason=after) for r in self._results[at + 1 :]]
        self._at = at
        self._record(msgspec.structs.replace(self._results[at], outcome=Outcome.ERROR, reason=why))
