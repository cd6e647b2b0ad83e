"""Provenance: the machine, software and commit of a measurement."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import torch

from builders.kernels.triton_runtime import TRITON_VERSION

KERNEL_PACKAGES = (
    "flashinfer-python",
    "tokenspeed-fa3",
    "flash-attn-3",
    "tokenspeed-flashmla",
    "flash-mla",
    "vllm",
    "sglang-kernel",
    "sgl-kernel",
)
"""Distributions that can provide a kernel."""
_PROBE_SECONDS = 10
_COMMIT, _DIRTY = "ATTN_BACKENDS_COMMIT", "ATTN_BACKENDS_DIRTY"
_PACKAGE = Path(__file__).parent
_DRIVER_QUERY = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a run took place. A field that could not be determined is "unknown: why"; dirty is then None.

    dirty: whether the source differs from the commit: a tracked file outside reports/ was changed, or one was added to
    a tracked folder. stated: names the environment variables that set commit and dirty where git could not tell, else
    None. packages: the installed packages that provide kernels, as "name version". Raises ValueError for a malformed
    date.
    """

    device: str
    torch: str
    triton: str
    python: str
    commit: str
    dirty: bool | None
    date: str
    driver: str | None
    cuda: str | None
    platform: str
    stated: str | None = None
    packages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        datetime.fromisoformat(self.date)
        if self.stated and "; git says" in self.stated:
            # An earlier version let the variables overrule git, and wrote what git said here: nobody can tell any more.
            msgspec.structs.force_setattr(self, "dirty", None)


def environment(device: torch.device) -> Environment:
    """Describe where this process runs; never raises.

    A copy without a git history gets commit and dirty from ATTN_BACKENDS_COMMIT (a hash) and ATTN_BACKENDS_DIRTY (0 or
    1); `stated` then says so. In a checkout, what git says counts, whatever these variables say.
    """
    on_cuda = device.type == "cuda"
    commit, dirty, stated = _checkout()
    return Environment(
        device=_probe(lambda: torch.cuda.get_device_name(device) if on_cuda else _cpu_name()),
        torch=_probe(lambda: str(torch.__version__)),
        triton=TRITON_VERSION,
        python=_probe(platform.python_version),
        commit=commit,
        dirty=dirty,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        driver=_probe(lambda: _run(*_DRIVER_QUERY).splitlines()[0]) if on_cuda else None,
        cuda=torch.version.cuda if on_cuda else None,
        platform=_probe(platform.platform),
        stated=stated,
        packages=_kernel_packages(),
    )


def _kernel_packages() -> tuple[str, ...]:
    found = []
    for name in KERNEL_PACKAGES:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return tuple(found)


def _probe(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except Exception as error:  # provenance must not cost a run its results
        return f"unknown: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), "") or platform.processor() or platform.machine()


def _run(*command: str) -> str:
    return subprocess.run(
        command, cwd=_PACKAGE.parent, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=True
    ).stdout.strip()


def _checkout() -> tuple[str, bool | None, str | None]:
    """Return the commit, whether the tree differs from it, and the environment variables that stated these, if any."""
    found, changed = _git_state(_PACKAGE)
    variables = {name: value for name in (_COMMIT, _DIRTY) if (value := os.environ.get(name))}
    if not variables or not found.startswith("unknown"):
        return found, changed, None
    commit = variables.get(_COMMIT, found)
    if _COMMIT in variables and not re.fullmatch("[0-9a-f]{4,64}", commit):
        commit = f"unknown: {_COMMIT} is not a commit: {commit[:80]!r}"
    return commit, {"0": False, "1": True}.get(variables.get(_DIRTY, "")), f"stated by {' and '.join(variables)}"


@cache
def _git_state(package: Path) -> tuple[str, bool | None]:
    """Return the commit and whether the tree differs from it. Only a checkout that tracks this package counts.

    Cached per process: modules are loaded by then, and in a fresh clone git reads every file each time.
    """
    commit = _probe(lambda: _git_commit(package))
    if commit.startswith("unknown"):
        return commit, None
    # Reports are excluded: otherwise the first report of a series would make the second one dirty.
    status = _probe(lambda: _run("git", "--no-optional-locks", "status", "--porcelain", "--", ".", ":!reports"))
    return commit, None if status.startswith("unknown") else any(map(_of_source, status.splitlines()))


def _of_source(line: str) -> bool:
    """Return whether a line of `git status --porcelain` is about the source. Untracked folders and files at the top,
    such as unpacked wheels or a log, are no part of it, unless the file is a module.
    """
    untracked, path = line.startswith("??"), line[3:].strip('"')
    return not untracked or "/" in path.rstrip("/") or path.endswith(".py")


def _git_commit(package: Path) -> str:
    try:
        _run("git", "ls-files", "--error-unmatch", f"{package.name}/__init__.py")
    except subprocess.CalledProcessError as error:
        raise LookupError("this package is not in a checkout of git") from error
    return _run("git", "rev-parse", "HEAD")
