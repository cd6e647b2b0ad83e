"""Turns on GPUs. Two openings of a file lock it against each other, also in one process."""

from __future__ import annotations

import fcntl
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from scripts.gpu_turns import GpuTurn


def may(kind: int, gpu: str, folder: Path) -> bool:
    """Whether one more process may enter (LOCK_SH), or have the GPU alone (LOCK_EX)."""
    with (folder / f"gpu-{gpu}.turn").open("w") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_engines_start_together_and_are_timed_alone(tmp_path: Path) -> None:
    turns = [GpuTurn(["0", "1"], tmp_path), GpuTurn(["1", "0"], tmp_path)]
    assert may(fcntl.LOCK_SH, "0", tmp_path) and not may(fcntl.LOCK_EX, "0", tmp_path)
    with ThreadPoolExecutor(2) as pool:
        waiting = {pool.submit(turn.alone): turn for turn in turns}
        turns.clear()
        (first,), (second,) = wait(waiting, return_when=FIRST_COMPLETED)
        assert not any(may(fcntl.LOCK_SH, gpu, tmp_path) for gpu in "01") and not second.done()
        # Its process ends.
        waiting.pop(first)
        second.result()
    assert not may(fcntl.LOCK_SH, "0", tmp_path)
    waiting.clear()
    assert may(fcntl.LOCK_EX, "0", tmp_path) and may(fcntl.LOCK_EX, "1", tmp_path)


def test_turn_on_one_gpu_leaves_others_free(tmp_path: Path) -> None:
    GpuTurn(["1"], tmp_path)
    turn = GpuTurn(["0"], tmp_path)
    turn.alone()
    assert may(fcntl.LOCK_EX, "1", tmp_path) and not may(fcntl.LOCK_SH, "0", tmp_path)
