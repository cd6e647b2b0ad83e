"""That the kernels are interpreted at all: a session of pytest without the variable does not collect their tests."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("file", ["Makefile", ".ci/run"])
def test_the_kernels_have_a_session_of_their_own(file: str) -> None:
    commands = (ROOT / file).read_text()
    session = r"TRITON_INTERPRET=1 \S*python -m pytest .*-m \"?%s\"? tests/interpreter"
    assert re.search(session % {"Makefile": "not slow", ".ci/run": "slow"}[file], commands)


def test_every_file_of_kernels_is_collected_where_they_are_interpreted() -> None:
    here = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    assert all("_kernel" in name for name in here - {"test_session.py"})
