"""Run backends and engines under NVIDIA's compute-sanitizer: python scripts/memcheck.py NAME... --json FILE.

torch's allocator keeps what is freed and rounds sizes up, so an access beyond a tensor may land in memory that is
allocated, and nobody sees it. What is launched directly therefore runs with PYTORCH_NO_CUDA_MEMORY_CACHING=1: poison
and padding checks of each backend, its advance, its fused writes, and an engine without graphs under each verifier. A
capture needs the allocator: memory of a graph must stay. So the graph family, whole rounds in every strategy and an
engine with graphs run under it.

A looping graph is repeated by the host here, iteration by iteration: in one that the device repeats, the sanitizer
(2025.3.1) reports accesses "out of bounds" and "inside the nearest allocation", or the driver meets an illegal
instruction. So it does with a WHILE node around a single product of torch, which without it runs right.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from attn_backends import registry
from scripts import engine_run
from scripts.free_places import on_a_free_one
from scripts.script_report import write_report
from spec_decode.cli.check import check
from spec_decode.drafter import GraphMode
from spec_decode.graphs import cuda

CHECKED = tuple(f"spec_decode.conformance.{name}_checks" for name in ("builder", "drafter", "graph", "numerics"))
"""Where the checks that are watched are defined."""
SCHEMA = "attn-memcheck/2"
UNCAPTURED = ("poison.*", "builder.padding_stays_inert*", "builder.advance_attends_right*", "numerics.fused_*")
CAPTURED = ("graph.*", "drafter.strategies_agree[[]k[1-8]-n[37][]]")
"""The graph family, and whole rounds of K = 1..8 with requests that stop on the way."""
VERIFIERS = ("rejection", "block", "synthetic:2")
REQUESTS = 12
BACKEND = "triton_paged"
"""The engine's."""
NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"


@dataclass(frozen=True)
class Target:
    """A Python process to run under the sanitizer. caching: whether torch's allocator may keep memory."""

    name: str
    arguments: tuple[str, ...]
    caching: bool
    checks: bool = False
    """Whether it takes --json FILE and writes the report of a check there."""


def targets(names: Sequence[str], only: Sequence[str]) -> Iterator[Target]:
    """Checks of these backends, and engines. only: patterns of checks, in the place of all that."""
    both = [("uncaptured", UNCAPTURED, False), ("captured", CAPTURED, True)]
    parts = [("captured", tuple(only), True)] if only else both
    for name in names:
        for part, patterns, caching in parts:
            options = [word for pattern in patterns for word in ("--only", pattern)]
            check = ("scripts/memcheck.py", "--check", name, "--device", "cuda", *options)
            yield Target(f"{name}, {part}", check, caching, checks=True)
    for verification in () if only else VERIFIERS:
        for mode in (GraphMode.NONE, GraphMode.FULL):
            serve = ("scripts/memcheck.py", "--serve", verification, mode.value)
            yield Target(f"engine, {verification}, graph mode {mode.value}", serve, mode is GraphMode.FULL)


def sanitize(target: Target, seconds: float, gpu: str = "0") -> dict[str, Any]:
    """What the sanitizer says of the process on that GPU, and how its checks came out, if it is one of checks; of one
    that outlives the seconds, what it had found until then."""
    row = {"target": target.name, "caching": target.caching}
    with tempfile.TemporaryDirectory() as folder:
        log, report = Path(folder, "log"), Path(folder, "report.json")
        command = [
            # Accesses alone: a binding that asks the driver for a symbol which it lacks gets an API error, too.
            *("compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no"),
            *("--target-processes", "all", "--log-file", str(log)),
            *(sys.executable, *target.arguments, *(("--json", str(report)) if target.checks else ())),
        ]
        env = {name: value for name, value in os.environ.items() if name != NO_CACHING}
        env |= {"CUDA_VISIBLE_DEVICES": gpu} | ({} if target.caching else {NO_CACHING: "1"})
        root = Path(__file__).resolve().parent.parent
        printed = Path(folder, "printed")
        with printed.open("w") as output:
            exit_status = _run(command, seconds, env=env, cwd=root, stdout=output, stderr=output)
        if exit_status is None:
            printed.write_text(f"cut off after {seconds:g} s")
        text = log.read_text() if log.exists() else ""
        results, last = _results(report), printed.read_text(errors="replace").splitlines()[-5:]
    summary = re.search(r"ERROR SUMMARY: (\d+) error", text)
    outcomes = Counter(result["outcome"] for result in results)
    # An error is a check that broke off, of memory that ran out, say: what it would have done was not seen.
    whole = bool(results) and exit_status is not None and not outcomes.keys() & {"not_run", "error"}
    return {
        **row,
        "finished": summary is not None and (whole if target.checks else exit_status == 0),
        "errors": int(summary.group(1)) if summary else None,
        "checks": dict(outcomes),
        "exit_status": exit_status,
        "said": [line for line in text.splitlines() if "Invalid" in line or "error" in line.lower()][:20],
        "printed": last,
    }


def _run(command: Sequence[str], seconds: float, **options: Any) -> int | None:
    """The exit status; None where the time was up, and with the process everything that it had started was ended."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **options)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _results(report: Path) -> list[dict[str, Any]]:
    """What the checks found; of a process that was cut off, what it had kept of that until then."""
    if report.exists():
        return list(json.loads(report.read_text())["results"])
    kept = report.with_name(f"{report.name}.part")
    lines = kept.read_text().splitlines(keepends=True) if kept.exists() else []
    # The last line is no whole one where the process was killed while it wrote.
    return [result for line in lines if line.endswith("\n") for result in json.loads(line)["results"]]


class HostLoop:
    """Stands in for WhileGraph: the same captured parts, and the host asks after each run whether to go on."""

    num_nodes: int | None = None

    def __init__(
        self,
        continue_flag: torch.Tensor,
        first: Callable[[], object],
        body: Callable[[], object],
        capture: Callable[[Callable[[], object]], torch.cuda.CUDAGraph],
    ) -> None:
        self._continue_flag, self._first, self._body = continue_flag, capture(first), capture(body)

    def replay(self) -> None:
        self._first.replay()
        while self._continue_flag.item():
            self._body.replay()


def serve(verification: str, mode: GraphMode, device: torch.device) -> engine_run.BusyRun:
    """Requests of every kind through a small engine of the shipped pair, under one verifier."""
    dtype = engine_run.dtype_for(BACKEND, 1, device)
    config = engine_run.RunConfig(registry.get(BACKEND), dtype, device, page_size=1)
    requests = engine_run.make_requests(REQUESTS, random.Random(0))
    options = {"graph_mode": mode, "autotune": False}
    return engine_run.serve(config, config.load_pair(), verification, requests, random.Random(0), **options)


def _visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",") if named else [str(index) for index in range(max(1, torch.cuda.device_count()))]


def main(argv: Sequence[str] | None = None) -> None:
    """Run every target, write the report, and fail unless each finished without an error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--only", action="append", default=[], help="patterns of checks, in the place of everything")
    parser.add_argument("--seconds", type=float, default=600.0, help="time allowed for a target")
    parser.add_argument("--jobs", type=int, default=6, help="targets at a time on each GPU")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=2, metavar=("VERIFIER", "MODE"), help="be the engine that is watched")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"), help="of --serve")
    parser.add_argument("--check", nargs=argparse.REMAINDER, help="be the check that is watched: its arguments")
    flags = parser.parse_args(argv)
    if flags.serve:
        verification, mode = flags.serve
        print(json.dumps(serve(verification, GraphMode(mode), flags.device).counts))
        return
    if flags.check:
        mock.patch.object(cuda, "WhileGraph", HostLoop).start()
        check(flags.check, prog_name="check")
    if not flags.names or flags.json is None:
        parser.error("backends to check and --json are needed; nothing was run. Name both.")
    watched = list(targets(flags.names, flags.only))
    roots = ["scripts.memcheck", "spec_decode.engine.engine", *CHECKED]
    checks = {"only": flags.only} if flags.only else {"uncaptured": UNCAPTURED, "captured": CAPTURED}
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    gpus = _visible_gpus() * flags.jobs
    on_a_free_gpu = on_a_free_one(gpus, lambda gpu, target: sanitize(target, flags.seconds, gpu))
    with ThreadPoolExecutor(len(gpus)) as pool:
        for future in as_completed([pool.submit(on_a_free_gpu, target) for target in watched]):
            rows.append(future.result())
            print(f"{time.monotonic() - began:5.0f} s", rows[-1], flush=True)
            # As it stands, for a run that is cut off: it says then that it was.
            content = {"finished": len(rows) == len(watched), "checks": checks, "targets": rows}
            write_report(flags.json, SCHEMA, torch.device("cuda"), roots, backends=flags.names, **content)
    if not all(row["finished"] and row["errors"] == 0 for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
