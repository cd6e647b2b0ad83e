"""Build the table of other engines' own tests, from the reports of others_suites.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.markdown_table import markdown_table
from scripts.vllm_tables import source

_OUTCOMES = {"pass": "passed", "fail": "failed", "refused": "refused", "not run": "not run", "skip": "skipped"}
"""What the reports say of a case, and the page."""


def table(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return how many cases of each name passed, by device. Raises ValueError for an outcome that has no column."""
    rows = []
    for report in reports:
        cases = Counter((row["backend"], row["outcome"]) for row in report["rows"])
        if unknown := {outcome for _, outcome in cases} - _OUTCOMES.keys():
            raise ValueError(f"a report of others' suites has the outcomes {unknown}, for which the page has no column")
        on = source(report) if report["env"]["cuda"] else f"CPU, {report['env']['date'][:10]}"
        for name in dict.fromkeys(row["backend"] for row in report["rows"]):
            rows.append([f"`{name}`", on, *(f"{cases[name, outcome]:,}" for outcome in _OUTCOMES)])
    numbers = [*_OUTCOMES.values()]
    return markdown_table(["name", "device, date", *numbers], rows, numbers)
