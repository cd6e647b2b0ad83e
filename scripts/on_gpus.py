"""GPUs of a machine: what a card is called, and a command on some of them for a limited time."""

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
    """The short name of a GPU: H100 of NVIDIA H100 80GB HBM3."""
    return device.removeprefix("NVIDIA ").split()[0]


def run_on_gpus(command: Sequence[str], gpus: Sequence[int], output: IO[str], seconds: float | None) -> int:
    """Its exit status; it runs in the project's folder, sees these GPUs alone, and both its outputs go to the file.

    gpus: numbered as this process sees them, which may not see all of the machine.
    All that it started is ended with it: a process that outlives it would hold memory of a GPU. Raises
    subprocess.TimeoutExpired after so many seconds; None: no limit.
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
            return process.wait(seconds)
        finally:
            # Whatever it started is of its session.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
