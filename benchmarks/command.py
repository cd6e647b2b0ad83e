"""The command line of the benchmarks: in a checkout, the subcommand `attn-backends bench`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks import CASES, Bench, run
from benchmarks.processes import run_in_processes
from benchmarks.report import report_bytes
from spec_decode.cli.options import device_option, resolve_device
from spec_decode.cli.output import UserError, did_you_mean, progress, require_writable, say, stdout, write
from spec_decode.tools.timing_limit import verdict

_SECONDS_BETWEEN_WRITES = 5.0


@click.command()
@click.argument("cases", nargs=-1, metavar="[CASE...]")
@device_option
@click.option("--json", "target", metavar="PATH", help="Write the rows to a file, or - for standard output.")
@click.option(
    "--processes",
    type=click.IntRange(1),
    default=1,
    help="Run in this many processes, one after another, and keep each row's slowest time.",
)
@click.option("--list", "only_list", is_flag=True, help="List the cases and stop.")
def bench(cases: tuple[str, ...], device: str | None, target: str | None, processes: int, only_list: bool) -> None:
    """Time the drafter and its parts.

    Without a CASE, times all of them. The exit status is 1 if a case started and failed.
    """
    where, console = resolve_device(device), stdout()
    if only_list and (cases or target is not None or processes > 1):
        raise UserError("--list only lists the cases. Remove the cases, --json and --processes.")
    if only_list:
        _print_rows(console, [{"case": name, "description": description} for name, description in CASES.items()])
        return
    if unknown := [case for case in cases if case not in CASES]:
        raise UserError(
            f"a case must be one of {', '.join(CASES)}, got {', '.join(unknown)}. "
            f"Fix the name.{did_you_mean(unknown[0], CASES)}"
        )
    several = ["--processes", str(processes)] if processes > 1 else []
    command = shlex.join(["attn-backends", "bench", *cases, "--device", str(where), *several])
    keep = _writer(target)
    require_writable(target)
    with progress(console) as update:

        def on_row(timings: Bench) -> None:
            update(f"timed {timings.rows[-1]['case']}")
            keep(timings)

        timed = partial(run_in_processes, processes) if several else run
        timings = timed(device=where, cases=cases or None, on_row=on_row, command=command)
    if target != "-":
        _print_rows(console, [_short(row) for row in timings.rows])
        if (rate := timings.env.get("copy_bytes_per_us")) and any(row.get("floor_us") for row in timings.rows):
            say(
                console,
                f"floor us: what a row must move, at the {rate / 1e6:.2f} TB/s that a copy read and wrote together on "
                "this device in this run, not at the rate of its data sheet",
            )
        for line in timings.missing:
            say(console, f"not timed: {line}")
    if target is not None:
        write(target, report_bytes(timings))
    if timings.stopped:
        raise SystemExit(1)


def _writer(target: str | None) -> Callable[[Bench], None]:
    """Return a function that writes the rows so far to the target file: a run takes minutes and can be cut off. Until
    the run ends, the report says that rows are missing."""
    written = time.monotonic()

    def keep(timings: Bench) -> None:
        nonlocal written
        if target is not None and target != "-" and time.monotonic() - written >= _SECONDS_BETWEEN_WRITES:
            last = timings.rows[-1]["case"]
            write(target, report_bytes(replace(timings, missing=[*timings.missing, f"all after {last}: cut off"])))
            written = time.monotonic()

    return keep


def _print_rows(console: Console, rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(column for row in rows for column in row if row[column] is not None))
    table = Table()
    for column in columns:
        table.add_column(column.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(Text(_text(row.get(column))) for column in columns))
    console.print(table)


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row for display, reduced to medians; the JSON has everything."""
    limits, met = verdict(row.get("limits", ()))
    shown = {**row, "peer": row.get("peer") or None, "limits": limits or None, "met": met}
    for name in ("floor_counts", "p50_of_processes", "kernel_interval_us", "load"):
        shown.pop(name, None)
    return {name: value["p50"] if isinstance(value, dict) else value for name, value in shown.items()}


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
