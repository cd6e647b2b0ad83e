"""A warm pytest session: runs in a copy of the project and forks for every request it reads.

Input, one JSON line: {"tests": [...], "trace": bool, "timeout": seconds, "timeouts": {test: seconds}}. Tests are files,
or test ids, which then run in the given order; the timeouts limit all tests together and each one. Output, one line:
pytest's exit status, or how the fork ended, and each test's outcome and seconds; when traced, also the functions it
entered and the sources it read. Nothing of the project is loaded before a fork: every fork loads its own copy.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

LOADED = (
    "torch",
    "torch._dynamo",
    "triton.language",
    "scipy.stats",
    "hypothesis",
    "msgspec",
    "click",
    "rich",
    "jinja2",
)
"""Modules that most tests import."""
PACKAGES = ("builders", "attn_backends", "spec_decode")


class Recorder:
    """Runs the requested tests in the requested order and records each outcome."""

    def __init__(self, tests: list[str], trace: bool, running: Path) -> None:
        """running: a file that holds the id of the running test."""
        self.running = running
        self.order = {test: place for place, test in enumerate(tests)}
        self.trace = trace
        self.found: dict[str, dict[str, Any]] = {}
        self._entered: dict[int, CodeType] = {}
        self._opened: set[str] = set()
        if trace:
            sys.addaudithook(self._record_open)
        self._folders = tuple(f"{Path.cwd() / package}{os.sep}" for package in PACKAGES)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if not self.trace:
            items[:] = sorted((item for item in items if item.nodeid in self.order), key=self._place)

    def _place(self, item: pytest.Item) -> int:
        return self.order[item.nodeid]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self._entered.clear()
        self._opened.clear()
        self.running.write_text(item.nodeid)
        found = self.found[item.nodeid] = {"outcome": "passed"}
        if self.trace:
            threading.settrace(self._enter)
            sys.settrace(self._enter)
        began = time.monotonic()
        try:
            return (yield)
        finally:
            found["seconds"] = round(time.monotonic() - began, 3)
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            found["functions"] = sorted(self._functions())
            found["read"] = sorted(map(os.path.relpath, self._opened))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self.found[report.nodeid]["outcome"] = report.outcome

    def _enter(self, frame: FrameType, event: str, argument: Any) -> None:
        self._entered[id(frame.f_code)] = frame.f_code

    def _record_open(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(".py") and str(arguments[0]).startswith(self._folders):
            self._opened.add(str(arguments[0]))

    def _functions(self) -> set[tuple[str, int]]:
        """Return file and first line of each entered function of the project."""
        # Rendered templates are code objects too.
        files = [code for code in list(self._entered.values()) if code.co_filename.endswith(".py")]
        inside = [code for code in files if code.co_filename.startswith(self._folders)]
        return {(os.path.relpath(code.co_filename), code.co_firstlineno) for code in inside}


def serve() -> None:
    """Answer requests until there are no more."""
    for name in LOADED:
        importlib.import_module(name)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        # Preload pytest and its plug-ins.
        pytest.main(["--version", "-c", os.devnull])
    sys.path.insert(0, os.getcwd())
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result, running = Path(folder, "result.json"), Path(folder, "running")
        child = os.fork()
        if not child:
            _run(request, result, running)
        try:
            status = _wait(child, request, running)
        finally:
            # Kill threads and children left by a crashed test; when the session is stopped, the test itself.
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        if status is None:
            hung = running.read_text() if running.exists() else ""
            return {"status": "hung", "tests": {hung: {"outcome": "failed"}} if hung in request["tests"] else {}}
        if not result.exists():
            return {"status": f"ended by {os.waitstatus_to_exitcode(status)}", "tests": {}}
        answer: dict[str, Any] = json.loads(result.read_text())
        return answer


def _run(request: dict[str, Any], result: Path, running: Path) -> None:
    """Run the request in the fork; does not return."""
    os.setsid()
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(silence, descriptor)
    recorder = Recorder(request["tests"], request["trace"], running)
    files = list(dict.fromkeys(test.partition("::")[0] for test in request["tests"]))
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-m",
        "not slow",
        *([] if request["trace"] else ["-x"]),
    ]
    try:
        status = int(pytest.main([*options, *files], plugins=[recorder]))
        written = json.dumps({"status": status, "tests": recorder.found})
        result.with_suffix(".part").write_text(written)
        result.with_suffix(".part").rename(result)
    finally:
        os._exit(70)


def _wait(child: int, request: dict[str, Any], running: Path) -> int | None:
    """Return a child's status, or None if it was killed because a test, or all of them together, took too long."""
    began = since = time.monotonic()
    test = ""
    while time.monotonic() < began + request["timeout"]:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        if running.exists() and (now := running.read_text()) != test:
            test, since = now, time.monotonic()
        if time.monotonic() > since + request["timeouts"].get(test, request["timeout"]):
            break
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


if __name__ == "__main__":
    serve()
