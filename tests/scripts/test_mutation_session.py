"""What a warm session of pytest says of the tests it is asked for: in a project of two files, without torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.import_graph import ROOT

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
    signal.pause()

def test_crashes():
    os.kill(os.getpid(), signal.SIGKILL)
"""
NEVER = 10_000


@pytest.fixture
def ask(tmp_path):
    """Answers of a session to one request after another."""
    (tmp_path / "product").mkdir()
    (tmp_path / "product/code.py").write_text(PRODUCT)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\npythonpath = .\n")

    def answers(*requests):
        usual = {"trace": False, "timeout": NEVER, "timeouts": {}}
        lines = "".join(json.dumps({**usual, **request}) + "\n" for request in requests)
        env = {"PYTHONPATH": str(ROOT), "PATH": ""}
        done = subprocess.run(
            [sys.executable, "-c", SERVE],
            cwd=tmp_path,
            env=env,
            input=lines,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return [json.loads(line) for line in done.stdout.splitlines()]

    return answers


def asked(*names):
    return {"tests": [f"test_it.py::test_{name}" for name in names]}


def test_traced_tests_have_the_functions_they_enter_and_the_sources_they_read(ask, tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS.partition("@pytest.mark.slow")[0])
    (answer,) = ask({"tests": ["test_it.py"], "trace": True})
    found = {name.partition("::")[2]: test for name, test in answer["tests"].items()}
    entered = {name: [line for _, line in test["functions"]] for name, test in found.items()}
    assert entered == {"test_one": [2, 5], "test_two": [8], "test_three": [], "test_skipped": []}
    assert [name for name, test in found.items() if test["read"] == ["product/code.py"]] == ["test_three"]


def test_tests_run_in_the_order_asked_for_until_one_fails(ask):
    (answer,) = ask(asked("one", "two", "three"))
    found = {name.partition("::")[2]: test["outcome"] for name, test in answer["tests"].items()}
    assert (answer["status"], list(found.items())) == (1, [("test_one", "passed"), ("test_two", "failed")])


def test_a_skipped_test_has_not_passed(ask):
    (answer,) = ask(asked("skipped"))
    assert [test["outcome"] for test in answer["tests"].values()] == ["skipped"]


def test_slow_tests_are_left_out(ask):
    assert ask(asked("slow"))[0]["status"] == 5


def test_a_test_that_never_ends_is_ended(ask):
    (answer,) = ask({**asked("hangs"), "timeout": 1})
    assert answer["status"] == "hung"


def test_a_test_that_takes_longer_than_it_may_is_ended_and_named(ask):
    hangs = "test_it.py::test_hangs"
    (answer,) = ask({**asked("one", "hangs", "two"), "timeouts": {hangs: 1}})
    assert answer == {"status": "hung", "tests": {hangs: {"outcome": "failed"}}}


def test_a_crash_is_told_and_the_session_goes_on(ask):
    crashed, good = ask(asked("crashes"), asked("one"))
    assert (crashed["status"], good["status"]) == ("ended by -9", 0)
