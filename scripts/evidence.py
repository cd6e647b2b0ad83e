"""Make evidence on this machine's GPUs, or renew what is stale: python scripts/evidence.py [--stale] [--minutes N].

Reports go to reports/<device>, e.g. reports/h200. A report is put in place when its step ends, even if the step found
failures. Checks run first, because the matrix is built from them; they share one GPU with other tests. Memcheck and
timings each have a GPU to themselves. A GPU's steps run on its share of the cores: next to other work, host times
double. With --minutes, a step that would not finish in time is skipped and named, and one that overruns is killed. The
exit status is 1 if a step failed. CUDA_VISIBLE_DEVICES excludes GPUs. Refuses a checkout with uncommitted changes: its
reports could not be reproduced.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from attn_backends import names, state_names
from scripts.free_places import share
from scripts.on_gpus import card, run_on_gpus
from scripts.only import chosen
from spec_decode.environment import environment
from spec_decode.files import ReportError, write_whole
from spec_decode.matrix.sources import read_documents, stale_reports

ROOT = Path(__file__).resolve().parent.parent
CLI = ("-m", "spec_decode")
ROUNDS = ("llama3-8b-eagle", "eagle-1024", "glm-4.7-flash-mtp", "deepseek-v4-mtp")
EAGLE3 = ("qwen3-8b-eagle3", "gpt-oss-20b-eagle3")
COMPILED = {**dict.fromkeys((*ROUNDS[:2], *EAGLE3), 140.0), "glm-4.7-flash-mtp": 360.0, "kimi-k2-eagle3": 240.0}
"""Drafts that torch 2.11 compiles, with the seconds of their benchmark. When it autotunes deepseek-v4-mtp's grouped
product, it uses offsets that crash the process."""
TWO_PROCESSES = ("--processes", "2")
"""Gaps between the kernels of a graph can differ from process to process."""
SLOTS = 12
"""Steps that share a GPU: most of them wait for the host."""


@dataclass(frozen=True)
class Step:
    """One report and the Python command that makes it; --json and its path are appended. seconds: approximate time on
    one GPU, shared with other steps if the step shares one."""

    report: str
    command: tuple[str, ...]
    seconds: float = 60.0


def gpu_test(name: str, seconds: float) -> Step:
    """Return the step that runs tests/gpu/test_<name>.py."""
    return Step(name.replace("_", "-"), ("-m", "pytest", "-q", "-m", "gpu", f"tests/gpu/test_{name}.py"), seconds)


def shared_steps(backends: Sequence[str], states: Sequence[str] = ()) -> list[Step]:
    """Return the steps that share a GPU, most valuable first, and a long one before shorter ones.

    states: backends of recurrent state, which no soak drafts with.
    """
    soak = ("--family", "soak", "--device", "cuda")
    return [
        *(Step(f"check-{name}", (*CLI, "check", name, "--device", "cuda"), 300) for name in (*backends, *states)),
        gpu_test("stale_controls", 120),
        gpu_test("pair_agreement", 700),
        gpu_test("engine_run", 400),
        gpu_test("transformers_logits", 300),
        gpu_test("published_families", 300),
        gpu_test("draft_kinds", 200),
        gpu_test("shared_gpu_replays", 240),
        *(Step(f"check-{name}-soak", (*CLI, "check", name, *soak), 500) for name in backends),
    ]


def lone_steps() -> list[Step]:
    """Return memcheck, which fills a GPU, and the steps that measure time, most valuable first."""
    cases: dict[str, tuple[tuple[str, ...], float]] = {
        "drafter": ((*ROUNDS, *TWO_PROCESSES), 430),
        "eagle3": ((*EAGLE3, *TWO_PROCESSES), 160),
        "kimi-k2-eagle3": (("kimi-k2-eagle3", *TWO_PROCESSES), 120),
        "backends": (("backends", *TWO_PROCESSES), 300),
        "throughput": (("throughput",), 120),
        "blocks": (("blocks",), 280),
        "trees": (("trees",), 150),
        "tree-verify": (("tree-verify",), 300),
        "sampling": (("sampling",), 240),
        "recurrent-state": (("recurrent-state",), 240),
        "flashinfer-decode": (("flashinfer-decode",), 120),
        "paged-verify": (("paged-verify",), 240),
        "products": (("products",), 360),
        **{f"{name}-compiled": ((f"{name}-compiled",), seconds) for name, seconds in COMPILED.items()},
    }
    bench = (*CLI, "bench")
    timed = [Step(f"bench-{name}", (*bench, *of, "--device", "cuda"), t) for name, (of, t) in cases.items()]
    return [gpu_test("memcheck", 800), *timed]


@dataclass(kw_only=True)
class Evidence:
    """Runs steps on the GPUs and records how each ended.

    shared: steps that share one GPU. lone: steps that each have a GPU to themselves. seconds: the time limit for all of
    them; None means none.
    """

    gpus: Sequence[int]
    shared: Sequence[Step]
    lone: Sequence[Step]
    into: Path
    seconds: float | None = None
    began: float = field(default_factory=time.monotonic)
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Run until every step has ended or time is up."""
        jobs: list[Callable[[int], object]] = [partial(self._run, step=step) for step in self.lone]
        if self.shared:
            jobs.insert(0, lambda gpu: share([gpu] * SLOTS, self.shared, self._run))
        share(self.gpus, jobs, lambda gpu, job: job(gpu))

    @property
    def _left(self) -> float | None:
        return None if self.seconds is None else max(0.0, self.began + self.seconds - time.monotonic())

    def _run(self, gpu: int, step: Step) -> None:
        if self._left is not None and step.seconds > self._left:
            self.skipped.append(step.report)
            self._say(f"{step.report}: skipped, takes about {step.seconds:.0f} s")
            return
        with tempfile.TemporaryDirectory() as folder:
            made, log = Path(folder, f"{step.report}.json"), self.into / f"{step.report}.log"
            with log.open("w") as output:
                try:
                    command = [sys.executable, *step.command, "--json", str(made)]
                    status = run_on_gpus(command, [gpu], output, self._left, among=self.gpus)
                except subprocess.TimeoutExpired:
                    status = -signal.SIGKILL
            # A killed step may have written only some of its rows.
            if made.exists() and status >= 0:
                write_whole(self.into / made.name, made.read_bytes())
        last = log.read_text().strip().rpartition("\n")[2]
        if status:
            self.failed.append(step.report)
        else:
            log.unlink()
        self._say(f"{step.report}: {status}  {last[:100]}")

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:5.0f} s  {text}", flush=True)


def folder_of(device: str) -> Path:
    """Return the report folder of a GPU: NVIDIA H100 80GB HBM3 -> reports/h100."""
    return ROOT / "reports" / card(device).lower()


def is_stale(path: Path) -> bool:
    """Return whether a report is missing, unreadable, or made from older source."""
    try:
        return not path.exists() or bool(stale_reports(read_documents([path])))
    except ReportError:
        return True


def main() -> None:
    """Run the steps, print how each ended, and fail if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stale", action="store_true", help="make only reports that are missing or of older source")
    parser.add_argument("--minutes", type=float, help="time limit; none by default")
    parser.add_argument("--only", action="append", help="pattern of report names, such as check-*; all by default")
    parser.add_argument("--into", type=Path, help="folder for the reports; reports/<device> by default")
    flags = parser.parse_args()
    if flags.minutes is not None and not flags.minutes > 0:
        parser.error(f"--minutes must be above 0, got {flags.minutes:g}.")
    if environment(torch.device("cpu")).dirty is not False:
        parser.error("evidence must come from a commit; this checkout has changes, or git cannot tell. Commit first.")
    gpus = list(range(torch.cuda.device_count()))
    if not gpus:
        parser.error("evidence needs a CUDA device, but none was found. Run it on a machine with one.")
    into = flags.into or folder_of(torch.cuda.get_device_name())
    into.mkdir(parents=True, exist_ok=True)

    shared, lone = shared_steps(names(), state_names()), lone_steps()
    only = chosen(parser, flags.only, [step.report for step in (*shared, *lone)])

    def selected(steps: Sequence[Step]) -> list[Step]:
        wanted = [step for step in steps if step.report in only]
        return [step for step in wanted if not flags.stale or is_stale(into / f"{step.report}.json")]

    evidence = Evidence(
        gpus=gpus,
        shared=selected(shared),
        lone=selected(lone),
        into=into,
        seconds=flags.minutes and flags.minutes * 60,
    )
    evidence.run()
    if evidence.skipped:
        print(f"skipped for lack of time: {', '.join(evidence.skipped)}")
    if evidence.failed:
        print(f"failed: {', '.join(sorted(evidence.failed))}; see the logs in {into}")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
