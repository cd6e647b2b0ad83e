"""Reports by version of a backend on a device, and the newest result of each check among several reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from spec_decode.conformance.report import Report, Result
from spec_decode.testing.outcome import Outcome

_NOT_SEEN = {Outcome.NOT_RUN, Outcome.UNAVAILABLE}
ByCase = dict[tuple[str, str], Result]
"""Results by check and case."""


def rows_of(reports: Iterable[Report]) -> list[list[Report]]:
    """Return the reports of each version of a backend on a device, newest first: GPUs first, then by device and
    backend, and of one backend the version that was checked last."""
    groups: dict[tuple[str, str, str], list[Report]] = {}
    for report in sorted(reports, key=lambda report: report.env.date, reverse=True):
        groups.setdefault((report.env.device, report.backend, report.version), []).append(report)
    ordered = sorted(groups.items(), key=lambda item: (item[1][0].env.cuda is None, *item[0][:2]))
    return [group for _, group in ordered]


def later_results(reports: Iterable[Report]) -> list[ByCase]:
    """Return for each of these reports, newest first, the results of later ones that replace its own. A check that did
    not run replaces nothing."""
    later: ByCase = {}
    found = []
    for report in reports:
        by_case = {(result.check, result.case): result for result in report.results}
        found.append({case: later[case] for case in by_case if case in later})
        later = {**{case: result for case, result in by_case.items() if result.outcome not in _NOT_SEEN}, **later}
    return found


def newest_results(reports: Sequence[Report]) -> Iterator[tuple[Result, Report]]:
    """Yield the results of these reports, newest first, that no later one replaces, each with its report."""
    for report, later in zip(reports, later_results(reports), strict=True):
        yield from ((result, report) for result in report.results if (result.check, result.case) not in later)


def disagree(older: Result, newer: Result | None) -> bool:
    """Return whether a check had another outcome before."""
    return newer is not None and older.outcome not in {newer.outcome, *_NOT_SEEN}
