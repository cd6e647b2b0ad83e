"""The Makefile names tests that exist: pytest runs none at all where one of its paths does not."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")


def test_what_make_oldest_and_newest_run_exists() -> None:
    (tests,) = re.findall(r"^RELEASE_TESTS := (.*)$", MAKEFILE, re.MULTILINE)
    (kernels,) = re.findall(
        r"^RELEASE_KERNELS := \$\(addprefix tests/interpreter/test_,(.*)\)$", MAKEFILE, re.MULTILINE
    )
    paths = [*tests.split(), *(f"tests/interpreter/test_{name}" for name in kernels.split())]
    assert len(paths) > 10 and [path for path in paths if not (ROOT / path).exists()] == []
