"""Which tests enter which functions, and whether any fails: copies of the project, with warm sessions in each."""

from __future__ import annotations

import ast
import compileall
import hashlib
import json
import os
import py_compile
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from scripts.free_places import share
from scripts.mutation_session import PACKAGES
from spec_decode.files import write_whole

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = tuple(f"{package}/**/*.py" for package in PACKAGES)
"""Patterns of the product's files."""
INTERPRETED = "tests/interpreter"
"""Tests of this folder run a second time, with every kernel in Triton's interpreter."""
PATIENCE = 120
"""Seconds that a test may take over ten times what it took before: on a busy machine it takes longer."""


@dataclass(frozen=True)
class TracedTest:
    """A test of one of the two sessions of `make test`, and how long it takes."""

    name: str
    interpreted: bool
    seconds: float
    functions: frozenset[str]
    """Those it enters, as file::name."""
    read: frozenset[str] = frozenset()
    """Files whose text it reads."""

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]


class Copy:
    """A copy of the project's tracked files in which one file at a time may be another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, stdout=-1, check=True)
        for name in listed.stdout.decode().split("\0"):
            if (ROOT / name).is_file():
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        # Byte code that says of which source it is: by time and size alone one mutant could pass for another.
        for package in PACKAGES:
            compileall.compile_dir(
                folder / package, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
            )
        self._sessions: dict[bool, subprocess.Popen[str]] = {}

    def run(
        self,
        tests: Sequence[str],
        *,
        interpreted: bool,
        trace: bool = False,
        seconds: Mapping[str, float] | None = None,
    ) -> dict[str, Any]:
        """What `mutation_session` answers. seconds: what each test takes; None: ten minutes all of them."""
        session = self._session(interpreted)
        assert session.stdin and session.stdout
        timeouts = {test: PATIENCE + 10 * own for test, own in (seconds or {}).items()}
        longest = PATIENCE + 10 * (sum(seconds.values()) if seconds else 600)
        request = {"tests": list(tests), "trace": trace, "timeout": longest, "timeouts": timeouts}
        print(json.dumps(request), file=session.stdin, flush=True)
        answer: dict[str, Any] = json.loads(session.stdout.readline())
        return answer

    def _session(self, interpreted: bool) -> subprocess.Popen[str]:
        if interpreted not in self._sessions:
            env = {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
            env.pop("TRITON_INTERPRET", None)
            if interpreted:
                env["TRITON_INTERPRET"] = "1"
            self._sessions[interpreted] = subprocess.Popen(
                [sys.executable, "scripts/mutation_session.py"],
                cwd=self.folder,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        return self._sessions[interpreted]

    def close(self) -> None:
        """End its sessions."""
        for session in self._sessions.values():
            assert session.stdin
            session.stdin.close()
            session.wait()


def traced_tests(copies: Sequence[Copy], paths: Sequence[str], kept: Path) -> tuple[list[TracedTest], list[str]]:
    """The tests below the paths that pass, with the functions that each enters, and the names of those that do not.

    kept: a file of what was seen before; only files of tests that are not in it as they are now run again, and all of
    them where the product is another.
    """
    seen: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    lock = threading.Lock()

    def trace(copy: Copy, job: tuple[str, bool]) -> None:
        file, interpreted = job
        answer = copy.run([file], interpreted=interpreted, trace=True)
        for found in answer["tests"].values():
            found["functions"] = sorted({name for at in found["functions"] if (name := _function(copy.folder, *at))})
        with lock:
            seen[keys[job]] = answer
            write_whole(kept, json.dumps(seen).encode())
        print(f"{file}: {len(answer['tests'])} tests, {answer['status']}", flush=True)

    files = sorted({str(f.relative_to(ROOT)) for path in paths for f in _test_files(ROOT / path)})
    jobs = [(file, interpreted) for file in files for interpreted in _sessions_of(file)]
    product = digest("".join(sources(PRODUCT).values()))
    keys = {job: _key(*job, product) for job in jobs}
    share(copies, [job for job in jobs if keys[job] not in seen], trace)
    passed, not_passed = [], []
    for file, interpreted in jobs:
        answer = seen[keys[file, interpreted]]
        # Passed, with failures, or without tests: otherwise the file did not run, or only in part.
        if answer["status"] not in (0, 1, 5):
            not_passed.append(f"{file}: {answer['status']}")
        for name, found in answer["tests"].items():
            if found["outcome"] == "passed":
                entered, read = frozenset(found["functions"]), frozenset(found.get("read", ()))
                passed.append(TracedTest(name, interpreted, found["seconds"], entered, read))
            elif found["outcome"] == "failed":
                not_passed.append(name)
    return passed, not_passed


def _test_files(path: Path) -> Iterable[Path]:
    return [path] if path.is_file() else path.rglob("test_*.py")


def _sessions_of(file: str) -> list[bool]:
    """Without and with the interpreter, as the file's conftest has it."""
    if not file.startswith(INTERPRETED):
        return [False]
    return [True] if "_kernel" in file else [False, True]


def sources(patterns: Iterable[str]) -> dict[str, str]:
    """The files of these patterns, by their path from the root."""
    paths = sorted({path for pattern in patterns for path in ROOT.glob(pattern)})
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def _key(file: str, interpreted: bool, product: str) -> str:
    return f"{file} {'interpreted' if interpreted else 'plain'} {digest((ROOT / file).read_text() + product)}"


def digest(text: str) -> str:
    """A short name for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _function(folder: Path, file: str, line: int) -> str:
    """The function that a line of a file is in, as file::name; empty for none."""
    name = min(
        ((end - begin, name) for name, begin, end in functions((folder / file).read_text()) if begin <= line <= end),
        default=(0, ""),
    )[1]
    return f"{file}::{name}" if name else ""


@cache
def functions(source: str) -> tuple[tuple[str, int, int], ...]:
    """Dotted name, first line with the decorators, and last line of every function of a source."""
    found: list[tuple[str, int, int]] = []

    def visit(parent: ast.AST, prefix: str) -> None:
        for node in ast.iter_child_nodes(parent):
            inner = prefix
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{prefix}{node.name}."
                if not isinstance(node, ast.ClassDef):
                    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                    found.append((f"{prefix}{node.name}", first, node.end_lineno or first))
            visit(node, inner)

    visit(ast.parse(source), "")
    return tuple(found)
