"""A command in a process of its own: what it says, how it ended, and that nothing it started outlives it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

import msgspec

_LAST_WORDS = 400
"""Characters of what the process printed, for the reason."""


class Stopped(Exception):
    """The process ended early, or was ended; the message says how."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Seconds that something may take, and what."""

    seconds: float
    what: str


@dataclass(frozen=True, slots=True)
class Apart:
    """A process that `started` has started."""

    process: subprocess.Popen[bytes]
    reader: int
    output: IO[bytes]

    def messages(self, each: Limit, total: Limit) -> Iterator[dict[str, Any]]:
        """One a line until the process closes the pipe. Stopped when a limit passes before the next one."""
        buffer, end = b"", time.monotonic() + total.seconds
        while True:
            left = end - time.monotonic()
            limit = each if each.seconds < left else total
            if not select.select([self.reader], [], [], max(0.0, min(each.seconds, left)))[0]:
                raise Stopped(f"the process outlived the limit of {limit.seconds:g} s for {limit.what} and was ended")
            chunk = os.read(self.reader, 1 << 16)
            if not chunk:
                return
            *lines, buffer = (buffer + chunk).split(b"\n")
            yield from map(msgspec.json.decode, lines)

    def status(self) -> str:
        """How it ended, in words; waits until it has. Empty for exit status 0."""
        status = self.process.wait()
        if status >= 0:
            return f"exit status {status}" if status else ""
        try:
            return signal.Signals(-status).name
        except ValueError:
            return f"signal {-status}"

    def last_words(self) -> str:
        """The end of what it printed, to be put behind how it ended; empty where it printed nothing."""
        self.output.seek(0)
        words = " ".join(self.output.read().decode(errors="replace").split())
        return f"; it printed: {words[-_LAST_WORDS:]}" if words else ""


@contextmanager
def started(command: Sequence[str], ask: dict[str, Any]) -> Iterator[Apart]:
    """Run a command, in a session of its own so that it can be ended with all that it starts, and end it.

    It gets two words more: the descriptor that it writes its messages to, each a line of JSON, and `ask` as JSON.
    """
    with tempfile.TemporaryFile() as output:
        reader, writer = os.pipe()
        words = [*command, str(writer), msgspec.json.encode(ask).decode()]
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[writer], start_new_session=True
            )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        try:
            yield Apart(process, reader, output)
        finally:
            os.close(reader)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
