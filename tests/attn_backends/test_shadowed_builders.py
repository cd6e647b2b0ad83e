"""Another package named `builders` on the path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["builders.py", "builders/__init__.py"])
def test_another_builders_package_is_named_in_the_error(name: str, tmp_path: Path) -> None:
    other = tmp_path / name
    other.parent.mkdir(exist_ok=True)
    other.touch()
    command, found = [sys.executable, "-c", "import attn_backends"], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=found, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"must be the package {ROOT / 'builders'}, got {other}" in done.stderr and "Rename" in done.stderr
