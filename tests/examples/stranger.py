"""An environment as a stranger has it: this one's packages are there, and what a test installs goes nowhere else."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

_SCRIPTS = {
    "attn-backends": "from spec_decode.cli.main import main; sys.exit(main())",
    "pytest": "import pytest; sys.exit(pytest.main())",
    "pip": "from pip._internal.cli.main import main; sys.exit(main())",
}
_LOCAL = ["--no-index", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
"""No network: what a package needs is there already, its build backend too."""


@dataclass(frozen=True)
class Stranger:
    """A virtual environment; `run` is its shell."""

    folder: Path

    @classmethod
    def arrive(cls, folder: Path) -> Stranger:
        """Make the environment in an empty folder."""
        venv.create(folder, with_pip=False, symlinks=True)
        inside = Path(sysconfig.get_path("purelib", "posix_prefix", {"base": str(folder), "platbase": str(folder)}))
        here = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
        # addsitedir, unlike a plain path, follows the .pth files there: the project may be installed editable.
        (inside / "here.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in here))
        for name, code in _SCRIPTS.items():
            script = folder / "bin" / name
            script.write_text(f"#!{folder}/bin/python\nimport sys\n{_with_options(name)}{code}\n")
            script.chmod(0o755)
        return cls(folder)

    def run(self, command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run shell commands in a folder; stderr is part of the output."""
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
        """Run commands that end with this status, and return what they said."""
        done = self.run(command, cwd)
        assert done.returncode == status, f"$ {command}\nended with {done.returncode}, not {status}:\n{done.stdout}"
        return done.stdout


def _with_options(name: str) -> str:
    return f"sys.argv[2:2] = {_LOCAL!r} if sys.argv[1] == 'install' else []\n" if name == "pip" else ""
