"""Isolated processes as forks of this one: importing everything again would take each two seconds."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import IO, Any

import pytest

from spec_decode.testing import process_isolation


class Fork:
    """The part of `subprocess.Popen` that `start_isolated` uses for python -c CODE ARGUMENT..., as a fork of this
    process in its own process group."""

    def __init__(
        self, command: Sequence[str], *, stdout: IO[bytes], pass_fds: Sequence[int] = (), **options: Any
    ) -> None:
        assert command[:2] == [sys.executable, "-c"] and options["start_new_session"]
        self._status: int | None = None
        self.pid = os.fork()
        os.setpgid(self.pid, self.pid)  # in both processes: either can be first
        if not self.pid:
            os.dup2(stdout.fileno(), 1)
            os.dup2(stdout.fileno(), 2)
            for kept, following in pairwise([2, *sorted(pass_fds), os.sysconf("SC_OPEN_MAX")]):
                os.closerange(kept + 1, following)
            os._exit(_run(command[2], ["-c", *command[3:]]))

    def wait(self) -> int:
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status


def _run(code: str, arguments: list[str]) -> int:
    """Run code as python -c does, without this process's signal handlers; return its exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.disable()
    warnings.simplefilter("ignore")
    sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
    sys.argv = arguments
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
    return 0


def fork_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `start_isolated` fork. Tests without forks cover that it starts a Python process."""
    monkeypatch.setattr(process_isolation, "subprocess", SimpleNamespace(Popen=Fork, DEVNULL=subprocess.DEVNULL))
