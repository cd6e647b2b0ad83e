"""A warm pytest session's answers about requested tests, in a project of two files without torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.import_graph import ROOT

pytestmark = pytest.mark.slow

SERVE = "from scripts import mutation_session as m; m.LOADED, m.PACKAGES = (), ('product',); m.serve()"
PRODUCT = """
def one():
    return helper()

def helper():
    return 1

def other():
    return 2
"""
TESTS = """
import os, pathlib, signal, pytest
from product.code import one, other

def test_one():
    assert one() == 1

def test_two():
    assert other() == 1

def test_three():
    assert "def one" in pathlib.Path(os.getcwd(), "product/code.py").read_text()

def test_skipped():
    pytest.skip("no reason")

@pytest.mark.slow
def test_slow():
    assert one() == 1

def test_hangs():
    pathlib.Path("hangs").touch()
    signal.pause()

def test_crashes():
    os.kill(os.getpid(), signal.SIGKILL)
"""
NEVER = 10_000


def asked(*names, seconds=NEVER, **each):
    """A request for these tests: how long it may take in all, and a test by its name."""
    tests = [f"test_it.py::test_{name}" for name in names]
    limits = {f"test_it.py::test_{name}": most for name, most in each.items()}
    return {"tests": tests, "trace": False, "timeout": seconds, "timeouts": limits}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The folder of two files, and what a session in it needs."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "product").mkdir()
    (folder / "product/code.py").write_text(PRODUCT)
    (folder / "test_it.py").write_text(TESTS)
    (folder / "test_traced.py").write_text(TESTS.partition("@pytest.mark.slow")[0])
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow\npythonpath = .\n")
    return {"cwd": folder, "env": {"PYTHONPATH": str(ROOT), "PATH": ""}, "stdout": subprocess.PIPE, "text": True}


@pytest.fixture(scope="module")
def answers(project):
    """What one session answers to one request after another, by what each is about."""
    requests = {
        "traced": {**asked(), "tests": ["test_traced.py"], "trace": True},
        "failing": asked("one", "two", "three"),
        "skipped": asked("skipped"),
        "slow": asked("slow"),
        "hanging": asked("hangs", seconds=1),
        "long": asked("one", "hangs", "two", hangs=1),
        "crashing": asked("crashes"),
        "good": asked("one"),
    }
    done = subprocess.run(
        [sys.executable, "-c", SERVE],
        input="".join(json.dumps(request) + "\n" for request in requests.values()),
        check=True,
        **project,
    )
    return dict(zip(requests, map(json.loads, done.stdout.splitlines()), strict=True))


def named(answer):
    return {name.partition("::test_")[2]: test for name, test in answer["tests"].items()}


def test_traced_tests_have_the_functions_they_enter_and_the_sources_they_read(answers):
    found = named(answers["traced"])
    entered = {name: [line for _, line in test["functions"]] for name, test in found.items()}
    assert entered == {"one": [2, 5], "two": [8], "three": [], "skipped": []}
    assert [name for name, test in found.items() if test["read"] == ["product/code.py"]] == ["three"]


def test_tests_run_in_the_order_asked_for_until_one_fails(answers):
    found = [(name, test["outcome"]) for name, test in named(answers["failing"]).items()]
    assert (answers["failing"]["status"], found) == (1, [("one", "passed"), ("two", "failed")])


def test_a_skipped_test_has_not_passed_and_slow_ones_are_left_out(answers):
    assert [test["outcome"] for test in named(answers["skipped"]).values()] == ["skipped"]
    assert answers["slow"]["status"] == 5


def test_a_test_that_never_ends_is_ended_and_one_that_takes_longer_than_it_may_is_named(answers):
    assert answers["hanging"]["status"] == "hung"
    assert answers["long"] == {"status": "hung", "tests": {"test_it.py::test_hangs": {"outcome": "failed"}}}


def test_a_crash_is_told_and_the_session_goes_on(answers):
    assert (answers["crashing"]["status"], answers["good"]["status"]) == ("ended by -9", 0)


def test_a_session_that_is_stopped_ends_the_test_that_runs(project):
    read, write = os.pipe()
    hangs = project["cwd"] / "hangs"
    # A shell's background jobs, as which these tests may run, ignore the signal.
    interruptible = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {SERVE}"
    hangs.unlink(missing_ok=True)
    with subprocess.Popen(
        [sys.executable, "-c", interruptible],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=[write],
        **project,
    ) as session:
        os.close(write)
        print(json.dumps(asked("hangs")), file=session.stdin, flush=True)
        while not hangs.exists() and session.poll() is None:
            time.sleep(0.01)
        session.send_signal(signal.SIGINT)
    with open(read) as held:
        assert held.read() == "", "ends when nobody is left who could write"
