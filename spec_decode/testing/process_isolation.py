"""Process isolation: run a command in its own process, read its messages, and end everything it started."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import TIMEOUT_MAX
from typing import IO, Any

import msgspec

_PRINTED_TAIL = 400
"""Characters of the process's output to include in the reason."""


class ProcessEnded(Exception):
    """The process ended early, or was killed; the message says how."""


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """A time limit in seconds, and what it limits."""

    seconds: float
    what: str


@dataclass(frozen=True, slots=True)
class IsolatedProcess:
    """A process started by `start_isolated`."""

    process: subprocess.Popen[bytes]
    reader: int
    output: IO[bytes]

    def messages(self, each: TimeLimit, total: TimeLimit) -> Iterator[dict[str, Any]]:
        """Yield one message per line until the process closes the pipe. Raises ProcessEnded if a limit passes first."""
        buffer, end = b"", time.monotonic() + total.seconds
        while True:
            left = end - time.monotonic()
            limit = each if each.seconds < left else total
            if not select.select([self.reader], [], [], max(0.0, min(each.seconds, left, TIMEOUT_MAX)))[0]:
                raise ProcessEnded(
                    f"the process exceeded the limit of {limit.seconds:g} s for {limit.what} and was killed"
                )
            chunk = os.read(self.reader, 1 << 16)
            if not chunk:
                return
            *lines, buffer = (buffer + chunk).split(b"\n")
            yield from map(msgspec.json.decode, lines)

    def status(self) -> str:
        """Wait for the process and describe how it ended. Empty for exit status 0."""
        status = self.process.wait()
        if status >= 0:
            return f"exit status {status}" if status else ""
        try:
            return signal.Signals(-status).name
        except ValueError:
            return f"signal {-status}"

    def printed_tail(self) -> str:
        """Return the end of its output, as text to append to how it ended; empty if it printed nothing."""
        self.output.seek(0)
        printed = " ".join(self.output.read().decode(errors="replace").split())
        return f"; it printed: {printed[-_PRINTED_TAIL:]}" if printed else ""


def python_module(name: str) -> tuple[str, ...]:
    """Return the command that runs a module with this process's sys.path.

    `python -m` would put the current folder first, where a folder named like a package would hide that package.
    """
    places = [str(place) for place in sys.path]
    run = f"run_module({name!r}, run_name='__main__', alter_sys=True)"
    return (sys.executable, "-c", f"import sys; sys.path[:] = {places!r}; from runpy import run_module; {run}")


@contextmanager
def start_isolated(command: Sequence[str], request: dict[str, Any]) -> Iterator[IsolatedProcess]:
    """Run a command in its own session, and on exit kill it with everything that it started.

    It gets two more arguments: the file descriptor for its messages, each a line of JSON, and `request` as JSON.
    """
    with tempfile.TemporaryFile() as output:
        reader, writer = os.pipe()
        arguments = [*command, str(writer), msgspec.json.encode(request).decode()]
        try:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[writer],
                start_new_session=True,
            )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        try:
            yield IsolatedProcess(process, reader, output)
        finally:
            os.close(reader)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
