"""Make all evidence of one commit on the GPUs of one machine: python scripts/evidence.py --into reports/h200.

Timings come first, one on each GPU, with the cores of the machine to themselves: beside much other work the host's
times double. Then memcheck has the GPUs to itself, whose processes it shares out among them, and everything else
shares them. A report is put in place as its step ends, also where the step found failures; the exit status is 1 if any
did. Refuses a checkout with changes: a report of them could not be made again.
"""

from __future__ import annotations

import argparse
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from attn_backends import names
from spec_decode.environment import environment
from spec_decode.files import write_whole

ROOT = Path(__file__).resolve().parent.parent
CLI = ("-m", "spec_decode")
ROUNDS = (
    "llama3-8b-eagle",
    "eagle-1024",
    "glm-4.7-flash-mtp",
    "qwen3-8b-eagle3",
    "gpt-oss-20b-eagle3",
    "deepseek-v4-mtp",
)
IN_TWO = ("--processes", "2")
"""What a driver does between two kernels may differ from process to process."""
SLOTS = 12
"""Steps that share a GPU: most of them wait for the host."""


@dataclass(frozen=True)
class Step:
    """One report and the Python command that makes it; --json and its file are added."""

    report: str
    command: tuple[str, ...]


def timed_steps() -> list[Step]:
    """Those whose numbers are times."""
    cases = {
        "drafter": (*ROUNDS, *IN_TWO),
        "competitors": ("competitors",),
        "parallel": ("parallel",),
        "throughput": ("throughput",),
        "sampling": ("sampling",),
        "backends": ("backends", *IN_TWO),
        "flashinfer-decode": ("flashinfer-decode",),
    }
    return [Step(f"bench-{name}", (*CLI, "bench", *which, "--device", "cuda")) for name, which in cases.items()]


def lone_steps(backends: Sequence[str]) -> list[Step]:
    """Those that take all GPUs at once."""
    return [Step("memcheck", ("scripts/memcheck.py", *backends))]


def shared_steps(backends: Sequence[str]) -> list[Step]:
    """The others, the longest first."""
    soak = ("--rounds", "20000", "--max-reqs", "8", "-k", "4", "--seed", "0", "--device", "cuda")
    return [
        *(Step(f"check-{name}", (*CLI, "check", name, "--device", "cuda")) for name in backends),
        Step("engine-run", ("scripts/engine_run.py", "--requests", "5000")),
        Step("pair-agreement", ("scripts/pair_agreement.py", "--jobs", "10")),
        Step("transformers-logits", ("scripts/transformers_logits.py",)),
        *(Step(f"soak-{name}", (*CLI, "soak", name, *soak)) for name in backends),
        Step("stale-controls", ("scripts/stale_controls.py", *backends, "--jobs", "10")),
        Step("shared-gpu-replays", ("scripts/shared_gpu_replays.py", "--seconds", "200")),
    ]


class Evidence:
    """Runs steps on the GPUs, and keeps what each ended with."""

    def __init__(
        self, gpus: Sequence[int], *, timed: Sequence[Step], lone: Sequence[Step], shared: Sequence[Step], into: Path
    ) -> None:
        self.gpus, self.lone, self.into = gpus, lone, into
        self.began = time.monotonic()
        self.failed: list[str] = []
        self._timed, self._shared = _waiting(timed), _waiting(shared)

    def run(self) -> None:
        """Until every step has ended."""
        _together([partial(self._take, self._timed, gpu) for gpu in self.gpus])
        for step in self.lone:
            self._run(step, *self.gpus)
        _together([partial(self._take, self._shared, gpu) for gpu in self.gpus for _ in range(SLOTS)])

    def _take(self, waiting: queue.SimpleQueue[Step], gpu: int) -> None:
        while True:
            try:
                step = waiting.get_nowait()
            except queue.Empty:
                return
            self._run(step, gpu)

    def _run(self, step: Step, *gpus: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            made, log = Path(folder, f"{step.report}.json"), self.into / f"{step.report}.log"
            with log.open("w") as output:
                done = subprocess.run(
                    [sys.executable, *step.command, "--json", str(made)],
                    cwd=ROOT,
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                )
            if made.exists():
                write_whole(self.into / made.name, made.read_bytes())
        last = log.read_text().strip().rpartition("\n")[2]
        if done.returncode:
            self.failed.append(step.report)
        else:
            log.unlink()
        print(f"{time.monotonic() - self.began:5.0f} s  {step.report}: {done.returncode}  {last[:100]}", flush=True)


def _waiting(steps: Sequence[Step]) -> queue.SimpleQueue[Step]:
    waiting: queue.SimpleQueue[Step] = queue.SimpleQueue()
    for step in steps:
        waiting.put(step)
    return waiting


def _together(work: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    """Run the steps, say how each ended, and fail if any did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, required=True, help="folder of the reports")
    parser.add_argument("--gpus", help="their numbers, 0,1 say; all of the machine if left out")
    parser.add_argument("--only", action="append", help="patterns of reports, check-* say; all if left out")
    flags = parser.parse_args()
    if environment(torch.device("cpu")).dirty:
        parser.error("evidence must be of a commit, this checkout has changes; nothing was run. Commit them first.")
    gpus = [int(gpu) for gpu in flags.gpus.split(",")] if flags.gpus else list(range(torch.cuda.device_count()))
    if not gpus:
        parser.error("evidence needs a CUDA device, none was found; nothing was run. Run it on a machine with one.")

    def asked(steps: Sequence[Step]) -> list[Step]:
        return [step for step in steps if any(fnmatchcase(step.report, only) for only in flags.only or ["*"])]

    flags.into.mkdir(parents=True, exist_ok=True)
    evidence = Evidence(
        gpus,
        timed=asked(timed_steps()),
        lone=asked(lone_steps(names())),
        shared=asked(shared_steps(names())),
        into=flags.into,
    )
    evidence.run()
    if evidence.failed:
        print(f"ended with failures: {', '.join(sorted(evidence.failed))}; see their logs in {flags.into}")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
