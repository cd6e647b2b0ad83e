"""The bench in several processes, one after another, and of each row the slowest.

What a driver does between two kernels of a graph can differ from process to process, for all the life of one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch

from builders import BatchError
from spec_decode.tools.bench.rows import Bench, BenchRow
from spec_decode.tools.timing_limit import TimingLimit

_CHILD = (sys.executable, "-m", "spec_decode")
_SAME = (
    *("case", "backend", "peer", "spec", "strategy", "num_reqs", "num_speculative_tokens", "context", "temperature"),
    *("num_groups", "num_tokens", "tree", "draft", "extend_in_graph", "batch_invariant"),
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
    on_row: Callable[[BenchRow], None] | None = None,
    command: str = "",
) -> Bench:
    """As `run`, of each row that of the slowest process, with the medians of all in `p50_of_processes`.

    Raises BatchError where a process ends without rows.
    """
    runs, failed = [], False
    for _ in range(count):
        rows, status = _run_child(cases or (), device)
        failed |= status != 0
        runs.append(rows)
    bench = Bench(device, None, missing=list(dict.fromkeys(line for rows in runs for line in rows[0]["missing"])))
    bench.stopped.extend(line for line in bench.missing if failed and ": stopped by " in line)
    for row in slowest(runs):
        bench.rows.append({**row, "command": command, "missing": bench.missing})
        if on_row:
            on_row(bench.rows[-1])
    return bench


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


def _run_child(cases: Sequence[str], device: torch.device) -> tuple[list[BenchRow], int]:
    """The rows of one process, and its exit status."""
    with TemporaryDirectory() as folder:
        target = Path(folder, "rows.json")
        arguments = ("bench", *cases, "--device", str(device), "--json", str(target))
        child = subprocess.run([*_CHILD, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        rows: list[BenchRow] = json.loads(target.read_text()) if target.exists() else []
        for row in rows:
            row["limits"] = msgspec.convert(row.get("limits", ()), tuple[TimingLimit, ...])
    if not rows:
        raise BatchError(
            f"a process of the bench must write rows, this one ended with {child.returncode} and none: "
            f"{child.stderr.strip()[-_LAST_WORDS:] or 'it said nothing'}. Nothing is reported; run it without "
            "--processes to see where it ends."
        )
    return rows, child.returncode
