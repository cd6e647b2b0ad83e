"""Run the bench in several processes, one after another, and keep each row's slowest time.

The driver's gap between two kernels of a graph can differ between processes, for a process's whole life.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.report import read_report
from benchmarks.rows import Bench, BenchRow
from builders import BatchError

_CHILD = (sys.executable, "-m", "spec_decode")
_SAME = (
    *("case", "backend", "peer", "spec", "strategy", "num_reqs", "num_speculative_tokens", "context", "temperature"),
    *("num_groups", "num_tokens", "tree", "draft", "extend_in_graph", "one_graph", "host_waits", "batch_invariant"),
)
"""Columns that identify a row."""
_TIMES = ("gpu_us", "wall_us", "host_us")
"""Rows are compared by the first of these they have."""
_STDERR_TAIL = 300


def run_in_processes(
    count: int,
    *,
    device: torch.device,
    cases: Sequence[str] | None = None,
    on_row: Callable[[Bench], None] | None = None,
    command: str = "",
) -> Bench:
    """Like `run`, but each row comes from the slowest process, with all medians in `p50_of_processes`.

    Raises BatchError if a process ends without all of its rows.
    """
    runs = [_run_child(cases or (), device) for _ in range(count)]
    sources = max((run.sources for run in runs), key=lambda found: len(found.parts) if found else 0)
    bench = Bench(device, None, runs[0].env, command, sources)
    for name in ("missing", "stopped"):
        getattr(bench, name).extend(dict.fromkeys(line for run in runs for line in getattr(run, name)))
    for row in slowest([_rows_of(run) for run in runs]):
        bench.rows.append(row)
        if on_row:
            on_row(bench)
    return bench


def _rows_of(run: Bench) -> list[BenchRow]:
    """Return a process's rows, each with the kernel interval of that process."""
    interval = run.env.get("kernel_interval_us")
    return [{**row, "kernel_interval_us": interval} for row in run.rows]


def slowest(runs: Sequence[Sequence[BenchRow]]) -> Iterator[BenchRow]:
    """Yield each row that any run has, from the run in which it took longest."""
    found: dict[tuple[Any, ...], list[BenchRow]] = {}
    for rows in runs:
        seen: dict[tuple[Any, ...], int] = {}
        for row in rows:
            key = tuple(row.get(column) for column in _SAME)
            seen[key] = seen.get(key, 0) + 1
            found.setdefault((*key, seen[key]), []).append(row)
    for same in found.values():
        medians = [_median(row) for row in same]
        slow = same[medians.index(max(medians, key=lambda median: median or 0.0))]
        yield {**slow, "p50_of_processes": None if None in medians else medians}


def _median(row: BenchRow) -> float | None:
    times = next((row[name] for name in _TIMES if row.get(name)), None)
    return times and float(times["p50"])


def _run_child(cases: Sequence[str], device: torch.device) -> Bench:
    with TemporaryDirectory() as folder:
        target = Path(folder, "rows.json")
        arguments = ("bench", *cases, "--device", str(device), "--json", str(target))
        child = subprocess.run([*_CHILD, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        bench = read_report(target, device)
    # Exit status 1 means that a case failed; with any other, rows can be missing.
    if not bench.rows or child.returncode != bool(bench.stopped):
        raise BatchError(
            f"a bench process must write all its rows, this one ended with {child.returncode} after {len(bench.rows)}: "
            f"{child.stderr.strip()[-_STDERR_TAIL:] or 'no error output'}. Nothing is reported; run without "
            "--processes to see where it stops."
        )
    return bench
