"""Turns on GPUs: processes start their engines next to each other, and each times its own alone."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path


class GpuTurn:
    """A process's turn on GPUs, among all that take turns on them. It starts as one of several; a process that enters
    while another has a GPU alone waits. It lasts as long as the process, or this object.

    gpus: names of the GPUs, as in CUDA_VISIBLE_DEVICES. folder: of the files that are locked, one for each GPU.
    """

    def __init__(self, gpus: Sequence[str], folder: Path) -> None:
        # Processes that lock several GPUs do so in one order, and hold nothing while they wait for the first.
        paths = [folder / f"gpu-{gpu}.turn" for gpu in sorted(gpus)]
        self._files = [path.open("w") for path in paths]
        self._take(fcntl.LOCK_SH)

    @classmethod
    def of_process(cls) -> GpuTurn:
        """Return a turn on every GPU that this process sees."""
        return cls(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(","), Path(tempfile.gettempdir()))

    def alone(self) -> None:
        """Wait until no other process has a turn on these GPUs but those that wait here too."""
        for file in self._files:
            fcntl.flock(file, fcntl.LOCK_UN)
        self._take(fcntl.LOCK_EX)

    def _take(self, kind: int) -> None:
        for file in self._files:
            fcntl.flock(file, kind)
