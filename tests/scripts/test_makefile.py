"""The Makefile names tests that exist, since pytest runs nothing if a path is missing, and prints what it will do."""

from __future__ import annotations

import re
import subprocess
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


def test_the_set_up_says_first_what_it_does_how_much_it_downloads_and_how_long_it_takes(tmp_path: Path) -> None:
    planned = ["make", "-n", "demo", f"VENV={tmp_path}"]
    commands = subprocess.run(planned, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    before, _, after = commands.partition('echo "make: setting up ')
    told = after.partition('"')[0]
    assert told.startswith(str(tmp_path)) and "3 GB to download" in told and "2 minutes" in told
    assert "pip install" not in before and "-m venv" not in before and "pip install" in after
