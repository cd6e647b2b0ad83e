"""The bench in several processes, one after another, and of each row the slowest.

What a driver does between two kernels of a graph can differ from process to process, for all the life of one.
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
"""Columns that say what a row is of."""
_TIMES = ("gpu_us", "wall_us", "host_us")
"""What a row is slow by: the first of these that it has."""
_LAST_WORDS = 300


def run_in_processes(
    count: int,
    *,
    device: torch.device,
    cases: Sequence[str] | None = None,
    on_row: Callable[[Bench], None] | None = None,
    command: str = "",
) -> Bench:
    """As `run`, of each row that of the slowest process, with the medians of all in `p50_of_processes`.

    Raises BatchError where a process ends without all of its rows.
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
    """A process's rows, each with what sets that process apart."""
    interval = run.env.get("kernel_interval_us")
    return [{**row, "kernel_interval_us": interval} for row in run.rows]


def slowest(runs: Sequence[Sequence[BenchRow]]) -> Iterator[BenchRow]:
    """Each row that any of the runs has, from the run in which it took longest."""
    found: dict[tuple[Any, ...], list[BenchRow]] = {}
    for rows in runs:
        seen: dict[tuple[Any, ...], int] = {}
        for row in rows:
            what = tuple(row.get(column) for column in _SAME)
            seen[what] = seen.get(what, 0) + 1
            found.setdefault((*what, seen[what]), []).append(row)
    for alike in found.values():
        medians = [_median(row) for row in alike]
        slow = alike[medians.index(max(medians, key=lambda median: median or 0.0))]
        yield {**slow, "p50_of_processes": None if None in medians else medians}


def _median(row: BenchRow) -> float | None:
    times = next((row[name] for name in _TIMES if row.get(name)), None)
    return times and float(times["p50"])


def _run_child(cases: Sequence[str], device: torch.device) -> Bench:
    """The bench in one process."""
    with TemporaryDirectory() as folder:
        target = Path(folder, "rows.json")
        arguments = ("bench", *cases, "--device", str(device), "--json", str(target))
        child = subprocess.run([*_CHILD, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        bench = read_report(target, device)
    # It ends with 1 where a case of it failed: with anything else, rows may be missing.
    if not bench.rows or child.returncode != bool(bench.stopped):
        raise BatchError(
            f"a process of the bench must write all its rows, this one ended with {child.returncode} after "
            f"{len(bench.rows)}: {child.stderr.strip()[-_LAST_WORDS:] or 'it said nothing'}. Nothing is reported; run "
            "it without --processes to see where it ends."
        )
    return bench
