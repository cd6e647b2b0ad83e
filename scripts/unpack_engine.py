"""Unpack only an engine's Python files: python scripts/unpack_engine.py vllm==0.33.0 FOLDER [REQUIREMENTS].

Downloads only the engine's wheel and unpacks only its Python. The packages of the file REQUIREMENTS are installed into
the same folder, without their dependencies. Installing the engine's extra would download gigabytes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

KEPT = (".py", ".cuh", ".h", ".json", ".jinja", ".toml", "METADATA", "entry_points.txt")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("folder", type=Path)
    parser.add_argument("requirements", nargs="?")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.requirements:
        target = ["--no-compile", "--no-deps", "--upgrade", "--target", str(options.folder)]
        subprocess.run([*PIP, "install", *target, "-r", options.requirements], check=True)
    with TemporaryDirectory() as downloads:
        subprocess.run([*PIP, "download", "--no-deps", "-d", downloads, options.engine], check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(options.folder, [name for name in archive.namelist() if name.endswith(KEPT)])


if __name__ == "__main__":
    main()
