"""Runs tests/interpreter in one process whose Triton kernels are interpreted, and counts what passed there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from builders.kernels.triton_runtime import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="needs the package triton")


def test_every_kernel_equals_its_torch_implementation_in_the_interpreter():
    run("not slow", at_least=400)


@pytest.mark.slow
def test_so_they_do_in_the_cases_that_take_long_to_interpret():
    run("slow", at_least=30)


def run(marked, at_least):
    folder = Path(__file__).parent / "interpreter"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, str(folder)]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, env=env, cwd=folder.parent.parent, capture_output=True, text=True, timeout=300)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout[-4000:]
    assert passed and int(passed[1]) >= at_least and "skipped" not in done.stdout, done.stdout[-4000:]
