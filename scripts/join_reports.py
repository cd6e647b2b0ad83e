"""Join reports of `vllm_figures.py` that one machine made from one commit: python scripts/join_reports.py FILE FILE ...
--json JOINED.

For a study whose arms ran in several calls. Refuses reports that differ in anything but their date, command and arms,
and an arm that is in two of them. The joined report has every command, and the date of the last.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_decode.files import ReportError, read_json, report_bytes, require_unedited, write_whole

OF_A_CALL = ("command", "arms", "agreement", "problems", "finished", "digest")
"""Fields of a report that differ from call to call."""


def joined(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the report of all arms. reports: by file name. Raises ReportError if they cannot be joined."""
    (first, head), *others = reports.items()
    expected = _same(head)
    for name, report in others:
        found = _same(report)
        differing = [field for field, value in found.items() if value != expected.get(field)]
        if found != expected:
            raise ReportError(
                f"{name} and {first} differ in {', '.join(differing) or 'fields'}. Join reports of one run."
            )
    arms = [arm for report in reports.values() for arm in report["arms"]]
    named = [arm["arm"]["name"] for arm in arms]
    if twice := sorted({name for name in named if named.count(name) > 1}):
        raise ReportError(f"{twice[0]} is in two of {', '.join(reports)}. Leave one of these out.")
    agreement = [row for report in reports.values() for row in report.get("agreement", [])]
    return {
        "schema": head["schema"],
        "env": {**head["env"], "date": max(report["env"]["date"] for report in reports.values())},
        "command": " && ".join(report["command"] for report in reports.values()),
        "sources": head["sources"],
        "arms": arms,
        **({"agreement": agreement} if agreement else {}),
        "problems": [problem for report in reports.values() for problem in report["problems"]],
        "finished": all(report["finished"] for report in reports.values()),
    }


def _same(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be the same in all reports, with the fields of the environment apart."""
    env = {f"env.{name}": value for name, value in report["env"].items() if name != "date"}
    return {name: value for name, value in report.items() if name not in (*OF_A_CALL, "env")} | env


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, help="reports to join, at least two")
    parser.add_argument("--json", type=Path, required=True, help="report file to write")
    flags = parser.parse_args(arguments)
    if len(flags.reports) < 2:
        parser.error(f"nothing to join with {flags.reports[0]}. Name at least two reports.")
    try:
        found = {str(path): read_json(path) for path in flags.reports}
        for name, report in found.items():
            require_unedited(report, name)
            if not isinstance(report, dict) or "arms" not in report:
                raise ReportError(f"{name} has no arms. Name reports of vllm_figures.py.")
        write_whole(flags.json, report_bytes(joined(found)))
    except ReportError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
