"""A new user's environment: it has this environment's packages, and what a test installs stays inside it."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

_SCRIPTS = {
    "attn-backends": "from spec_decode.cli.main import main; sys.exit(main())",
    "pytest": "import pytest; sys.exit(pytest.main())",
    "pip": "from pip._internal.cli.main import main; sys.exit(main())",
}
_LOCAL = ["--no-index", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
"""No network: everything a package needs is there, including its build backend."""


@dataclass(frozen=True)
class Stranger:
    """A virtual environment; `run` is its shell."""

    folder: Path

    @classmethod
    def arrive(cls, folder: Path, needing: Sequence[str] | None = None) -> Stranger:
        """Make the environment in an empty folder. needing: requirements; the environment then has only these and their
        own requirements."""
        venv.create(folder, with_pip=False, symlinks=True)
        inside = Path(sysconfig.get_path("purelib", "posix_prefix", {"base": str(folder), "platbase": str(folder)}))
        if needing is None:
            here = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
            # addsitedir, unlike a plain path, follows the .pth files there: the project may be installed editable.
            (inside / "here.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in here))
        for entry in _entries(needing or ()):
            (inside / entry.name).symlink_to(entry)
        for name, code in _SCRIPTS.items():
            script = folder / "bin" / name
            script.write_text(f"#!{folder}/bin/python\nimport sys\n{_with_options(name)}{code}\n")
            script.chmod(0o755)
        return cls(folder)

    def run(self, command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run shell commands in a folder; stderr goes to the output."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST", "PIP_"))}
        env = {
            **kept,
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "400",
            "CUDA_VISIBLE_DEVICES": "",
        }
        return subprocess.run(
            ["bash", "-ec", command],
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def must(self, command: str, cwd: Path, *, status: int = 0) -> str:
        """Run commands that must end with this status, and return their output."""
        done = self.run(command, cwd)
        assert done.returncode == status, f"$ {command}\nended with {done.returncode}, not {status}:\n{done.stdout}"
        return done.stdout


def _entries(needing: Sequence[str]) -> set[Path]:
    """Return what the required distributions, and their own requirements, have in the package folder."""
    entries: set[Path] = set()
    seen: set[str] = set()
    wanted = [Requirement(text) for text in needing]
    while wanted:
        required = wanted.pop()
        if str(required) in seen or (required.marker and not required.marker.evaluate({"extra": ""})):
            continue
        seen.add(str(required))
        found = distribution(required.name)
        entries |= {Path(str(found.locate_file(file.parts[0]))) for file in found.files or () if file.parts[0] != ".."}
        for text in found.requires or ():
            further = Requirement(text)
            if any(further.marker is None or further.marker.evaluate({"extra": e}) for e in ("", *required.extras)):
                further.marker = None
                wanted.append(further)
    return {entry for entry in entries if entry.exists() and entry.name != "__pycache__"}


def _with_options(name: str) -> str:
    return f"sys.argv[2:2] = {_LOCAL!r} if sys.argv[1] == 'install' else []\n" if name == "pip" else ""
