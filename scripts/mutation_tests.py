"""Find which tests enter which functions, and whether any fails, in copies of the project with warm sessions."""

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
"""Tests in this folder run a second time, with every kernel in Triton's interpreter."""
PATIENCE = 120
"""Seconds allowed beyond ten times a test's earlier duration: a busy machine is slower."""


@dataclass(frozen=True)
class TracedTest:
    """A test from one of the two sessions of `make test`, and its duration."""

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
    """A copy of the project's tracked files in which one file at a time can be replaced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, stdout=-1, check=True)
        for name in listed.stdout.decode().split("\0"):
            if (ROOT / name).is_file():
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        # Hash-checked byte code: by time and size, one mutant could pass for another.
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
        """Return `mutation_session`'s answer. seconds: each test's usual duration; None: ten minutes in total."""
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
        """End the sessions."""
        for session in self._sessions.values():
            assert session.stdin
            session.stdin.close()
            session.wait()


def traced_tests(copies: Sequence[Copy], paths: Sequence[str], kept: Path) -> tuple[list[TracedTest], list[str]]:
    """Return the passing tests below the paths, with the functions each enters, and the names of the tests that do not
    pass.

    kept: a file of earlier results. Only test files that changed since are run again; if the product changed, all are.
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
        # 0 passed, 1 failures, 5 no tests; any other status means the file did not run, or only in part.
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
    """Return the file's sessions (interpreted or not), matching the conftest of that folder."""
    if not file.startswith(INTERPRETED):
        return [False]
    return [True] if "_kernel" in file else [False, True]


def sources(patterns: Iterable[str]) -> dict[str, str]:
    """Return the text of each file that matches, by path from the root."""
    paths = sorted({path for pattern in patterns for path in ROOT.glob(pattern)})
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def _key(file: str, interpreted: bool, product: str) -> str:
    return f"{file} {'interpreted' if interpreted else 'plain'} {digest((ROOT / file).read_text() + product)}"


def digest(text: str) -> str:
    """Return a short digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _function(folder: Path, file: str, line: int) -> str:
    """Return the innermost function around a line, as file::name; empty if there is none."""
    name = min(
        ((end - begin, name) for name, begin, end in functions((folder / file).read_text()) if begin <= line <= end),
        default=(0, ""),
    )[1]
    return f"{file}::{name}" if name else ""


@cache
def functions(source: str) -> tuple[tuple[str, int, int], ...]:
    """Return the name, first line and last line of each function in a source."""
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
