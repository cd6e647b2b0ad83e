"""Kernels are really interpreted: a pytest session without the variable does not collect their tests."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("which", ["not slow", "slow"])
def test_kernels_have_their_own_session(which):
    session = rf"TRITON_INTERPRET=1 \S*python \$\(PYTEST\) -m \"?{which}\"? tests/interpreter"
    assert re.search(session, (ROOT / "Makefile").read_text())


@pytest.mark.parametrize("target", ["test", "oldest", "newest", "slow"])
def test_ci_runs_every_session(target):
    assert re.search(rf"^(timed make|within \d+) {target}$", (ROOT / ".ci/run").read_text(), re.MULTILINE)


def test_every_interpreter_file_is_named_for_kernels() -> None:
    here = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    assert all("_kernel" in name for name in here - {"test_session.py", "test_out_of_range.py", "test_wide_strides.py"})
