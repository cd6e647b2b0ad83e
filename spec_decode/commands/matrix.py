"""`attn-backends matrix`: the compatibility matrix of reports."""

from __future__ import annotations

from pathlib import Path

import click

from spec_decode.commands.check import run_checks
from spec_decode.commands.common import (
    UserError,
    chosen_names,
    device_option,
    interpret_kernels_on,
    resolve_device,
    stdout,
    write,
)

REPORTS = Path("reports")
_PATTERN = "check-*.json"


@click.command()
@click.argument("paths", nargs=-1, metavar="[REPORT.json...]", type=click.Path(path_type=Path))
@click.option("--run", "names", multiple=True, metavar="NAME", help="Check NAME afresh and show it; repeatable.")
@device_option
@click.option("--markdown", metavar="PATH", help="Write Markdown to a file, or - for standard output.")
@click.option("--json", "as_json", metavar="PATH", help="Write JSON to a file, or - for standard output.")
def matrix(
    paths: tuple[Path, ...],
    names: tuple[str, ...],
    device: str | None,
    markdown: str | None,
    as_json: str | None,
) -> None:
    """Show what each backend was seen to do, by report.

    A folder stands for every check-*.json below it. Without a report and without --run, reports/ is shown.
    """
    where = resolve_device(device)
    if names:
        interpret_kernels_on(where)
    from spec_decode.matrix import build_matrix, to_json, to_markdown, to_table
    from spec_decode.report import Report

    files = find_reports(paths if paths or names else (REPORTS,))
    if not files and not names:
        raise UserError(
            f"a matrix needs reports, found no {_PATTERN} below {', '.join(map(str, paths or (REPORTS,)))}; "
            "nothing was shown. Name reports, or use --run available for fresh ones."
        )
    reports = [Report.load(file) for file in files]
    console = stdout()
    reports += [run_checks(console, name, where) for name in chosen_names(names, where)]
    result = build_matrix(reports)
    if "-" not in (markdown, as_json):
        console.print(to_table(result))
    if markdown is not None:
        write(markdown, to_markdown(result))
    if as_json is not None:
        write(as_json, to_json(result).decode())


def find_reports(paths: tuple[Path, ...]) -> list[Path]:
    """The files that the paths name; a folder stands for the reports below it, and reports/ may be absent."""
    found: list[Path] = []
    for path in paths:
        found += sorted(path.rglob(_PATTERN)) if path.is_dir() or path == REPORTS else [path]
    return found
