"""GPU names, and commands that run on selected GPUs with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent


def card(device: str) -> str:
    """Return the short name of a GPU: H100 for NVIDIA H100 80GB HBM3."""
    return device.removeprefix("NVIDIA ").split()[0]


def cores_of(gpus: Sequence[int], among: Sequence[int]) -> list[int]:
    """Return the share of these GPUs of this process's cores; all cores if there are fewer than GPUs."""
    cores = sorted(os.sched_getaffinity(0))
    each, places = len(cores) // len(among), [among.index(gpu) for gpu in gpus]
    return [core for place in places for core in cores[place * each : (place + 1) * each]] or cores


def run_on_gpus(
    command: Sequence[str],
    gpus: Sequence[int],
    output: IO[str],
    seconds: float | None,
    *,
    among: Sequence[int],
) -> int:
    """Run a command in the project's folder that sees only these GPUs, on their share of the cores, and return its exit
    status.

    gpus: indices among the GPUs that this process sees, which can be fewer than the machine has. among: all GPUs in use
    at the time. Next to other work on its cores, a command's host times double. `output` gets stdout and stderr. Every
    process the command started is killed when it ends: a survivor would hold GPU memory. Raises
    subprocess.TimeoutExpired after `seconds`; None means no limit.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [visible.split(",")[gpu] for gpu in gpus] if visible else map(str, gpus)
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(names)},
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            # A thread inherits its starter's cores, and a fresh interpreter has started none yet.
            with suppress(ProcessLookupError):
                os.sched_setaffinity(process.pid, cores_of(gpus, among))
            return process.wait(seconds)
        finally:
            # Everything it started is in its session.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
