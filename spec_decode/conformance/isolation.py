"""Check a backend in a process of its own: what crashes or hangs there is named, and costs no other its results."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

import msgspec

from spec_decode.report import EVERYTHING, Environment, Outcome, Report, Result

_LAST_WORDS = 400
"""Characters of what the process printed, for the reason."""
_CHILD = (sys.executable, "-m", "spec_decode.conformance.child")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Seconds that one check and that all checks of a backend may take. Loading the backend counts as a check."""

    check: float = 600.0
    backend: float = 7200.0


class _Stopped(Exception):
    """The process ended early, or was ended; the message says how."""


def check_apart(
    name: str,
    *,
    env: Environment,
    ask: dict[str, Any],
    limits: Limits | None = None,
    on_result: Callable[[Result], None] | None = None,
    child: Sequence[str] = _CHILD,
) -> Report:
    """`check_backend` in another process; always a whole report.

    ask: the keyword arguments of `spec_decode.conformance.runner.plan`, the device by name. If the process dies or
    outlives a limit, the check in flight is an `error` that says so, and the ones behind it stay `not_run`. env: where
    a process that dies before it says so ran.
    """
    limits = limits or Limits()
    progress = _Progress(name, env, str(ask.get("command", "")), on_result)
    with tempfile.TemporaryFile() as output:
        process, reader = _start([*child, name], ask, output)
        try:
            for message in _messages(reader, process, limits):
                progress.take(message)
            progress.require_whole(process.wait())
        except _Stopped as stop:
            progress.stop(f"{stop}{_last_words(output)}")
        finally:
            os.close(reader)
            _end(process)
    return progress.report


class _Progress:
    """The report as far as the messages of the process tell it."""

    def __init__(self, name: str, env: Environment, command: str, on_result: Callable[[Result], None] | None) -> None:
        loading = Result(
            check="contract.loads",
            family="contract",
            case="any",
            outcome=Outcome.NOT_RUN,
            tags=(EVERYTHING,),
            repro=command,
        )
        self.report = Report(backend=name, version="unknown", env=env, command=command, results=(loading,))
        self._results = [loading]
        self._at = 0
        self._on_result = on_result

    def take(self, message: dict[str, Any]) -> None:
        """A plan: {"report": document}; the next result: {"result": document}."""
        if "report" in message:
            self.report = Report.of(message["report"], "the process")
            self._results, self._at = list(self.report.results), 0
            if self._results and self._results[0].outcome is not Outcome.NOT_RUN:
                self._record(self._results[0])
        else:
            document = {**self.report.document(), "results": [message["result"]]}
            self._record(Report.of(document, "the process").results[0])

    def _record(self, result: Result) -> None:
        self._results[self._at] = result
        self._at += 1
        self.report = msgspec.structs.replace(self.report, results=tuple(self._results))
        if self._on_result:
            self._on_result(result)

    def require_whole(self, status: int) -> None:
        if status != 0 or self._at < len(self._results):
            raise _Stopped(f"the process ended with {_status(status)}")

    def stop(self, why: str) -> None:
        """Lay what happened on the check in flight, or on the last one when all were done."""
        at = min(self._at, len(self._results) - 1)
        behind = f"{self._results[at].check}[{self._results[at].case}] ended the process"
        self._results[at + 1 :] = [msgspec.structs.replace(r, reason=behind) for r in self._results[at + 1 :]]
        self._at = at
        self._record(msgspec.structs.replace(self._results[at], outcome=Outcome.ERROR, reason=why))


def _start(command: Sequence[str], ask: dict[str, Any], output: IO[bytes]) -> tuple[subprocess.Popen[bytes], int]:
    """The process, in a session of its own so that it can be ended with all that it starts, and its messages."""
    reader, writer = os.pipe()
    words = [*command, str(writer), msgspec.json.encode(ask).decode()]
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[writer], start_new_session=True
        )
    finally:
        os.close(writer)
    return process, reader


def _messages(reader: int, process: subprocess.Popen[bytes], limits: Limits) -> Iterator[dict[str, Any]]:
    """One message a line until the process closes the pipe. _Stopped when a limit passes before the next one."""
    buffer, end = b"", time.monotonic() + limits.backend
    while True:
        wait = min(limits.check, end - time.monotonic())
        if not select.select([reader], [], [], max(0.0, wait))[0]:
            which = f"{limits.check:g} s for a check" if wait == limits.check else f"{limits.backend:g} s for a backend"
            raise _Stopped(f"the process outlived the limit of {which} and was ended")
        chunk = os.read(reader, 1 << 16)
        if not chunk:
            return
        *lines, buffer = (buffer + chunk).split(b"\n")
        yield from map(msgspec.json.decode, lines)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _status(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _last_words(output: IO[bytes]) -> str:
    output.seek(0)
    words = " ".join(output.read().decode(errors="replace").split())
    return f"; it printed: {words[-_LAST_WORDS:]}" if words else ""
