"""Write and read the report of a run; nothing else does either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.rows import EMPTY, STOPPED, Bench, BenchRow
from benchmarks.titles import TITLES
from spec_decode import files
from spec_decode.matrix.sources import TIMING_SCHEMA, Quantiles, TimingReport
from spec_decode.source_digests import SourceRecord, backend_modules

_DIGITS = 5
"""Significant digits in a file; no timing is more precise."""


def report_bytes(bench: Bench) -> bytes:
    """Encode the rows so far for `spec_decode.matrix.sources.TimingReport`, without a row's empty fields."""
    floors = list(dict.fromkeys(row["floor_counts"] for row in bench.rows if row.get("floor_counts")))
    rows = [{name: _short(value) for name, value in row.items() if not _is_nothing(value)} for row in bench.rows]
    for row in rows:
        if "floor_counts" in row:
            row["floor_counts"] = floors.index(row["floor_counts"])
    return files.report_bytes(
        {
            "schema": TIMING_SCHEMA,
            "env": dict(bench.env),
            "command": bench.command,
            "sources": msgspec.to_builtins(bench.sources or _sources(bench)),
            "missing": list(bench.missing),
            "floor_counts": floors,
            "titles": {case: TITLES[case] for case in dict.fromkeys(row["case"] for row in rows) if case in TITLES},
            "rows": rows,
        }
    )


def read_report(path: Path, device: torch.device) -> Bench:
    """Read the run back from its report; no file, no rows. Raises ReportError if the file is unreadable."""
    if not path.exists():
        return Bench(device, None)
    document = files.read_json(path)
    whole = msgspec.convert(document, TimingReport)
    bench = Bench(device, None, document["env"], whole.command, sources=whole.sources, missing=list(whole.missing))
    bench.stopped.extend(line for line in whole.missing if f": {STOPPED}" in line)
    for typed, row in zip(whole.rows, document["rows"], strict=True):
        quantiles = {
            name: {key: getattr(value, key) for key in Quantiles.__struct_fields__}
            for name in row
            if isinstance(value := getattr(typed, name, None), Quantiles)
        }
        counts = whole.floor_counts[row["floor_counts"]] if "floor_counts" in row else None
        bench.rows.append({**EMPTY, **row, **quantiles, "limits": typed.limits, "floor_counts": counts})
    return bench


def _is_nothing(value: Any) -> bool:
    return value is None or value is False or value in ((), [])


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict) and value.keys() == set(Quantiles.__struct_fields__):
        return [_short(value[name]) for name in Quantiles.__struct_fields__]
    if isinstance(value, (list, tuple)):
        return [_short(item) for item in value]
    return msgspec.to_builtins(value)


def _sources(bench: Bench) -> SourceRecord:
    """Return the modules behind each case and the backends in its rows."""
    roots = {part: set(modules) for part, modules in bench.roots.items()}
    for row in bench.rows:
        roots.setdefault(part_of(row), set()).update(backend_modules([row["backend"]]))
    return SourceRecord.of(roots)


def part_of(row: BenchRow) -> str:
    """Return the case of a row: llama3-8b-eagle for its rows llama3-8b-eagle/round and .../steps."""
    return str(row["case"]).partition("/")[0]
