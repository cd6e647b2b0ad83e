"""The matrix in a few lines, for a README: what passed of each backend on each device."""

from __future__ import annotations

from collections.abc import Sequence

from spec_decode.conformance.report import FAILURES, Report
from spec_decode.files import ReportError
from spec_decode.matrix.text import markdown
from spec_decode.testing.outcome import Outcome

BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"


def to_summary(reports: Sequence[Report]) -> str:
    """A Markdown table: a row for each backend of a library, a column for each device, GPUs first.

    A cell counts the checks that passed of those that ran, refusals left out, in the newest report, with its date.
    """
    newest: dict[tuple[str, str], Report] = {}
    for report in sorted(reports, key=lambda report: report.env.date):
        if not report.engine:
            newest[report.backend, report.env.device] = report
    devices = sorted({(report.env.cuda is None, report.env.device) for report in newest.values()})
    names = ["CPU" if on_cpu else device.removeprefix("NVIDIA ") for on_cpu, device in devices]
    lines = [["backend", *names], ["---"] * (1 + len(names))]
    for backend in sorted({backend for backend, _ in newest}):
        cells = [_cell(newest.get((backend, device))) for _, device in devices]
        lines.append([f"`{backend}`", *map(markdown, cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_summary(page: str, table: str, where: str) -> str:
    """The page with the table between its markers. Raises ReportError where it does not have both, once each."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in after or END in after:
        raise ReportError(f"{where} must have the lines {BEGIN} and {END}, once each. Add them.")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def _cell(report: Report | None) -> str:
    if report is None:
        return ""
    counts = report.counts
    ran = counts[Outcome.PASS] + sum(counts[bad] for bad in (*FAILURES, Outcome.XFAIL))
    return f"{counts[Outcome.PASS]} of {ran} ({report.env.date[:10]})" if ran else "needs other hardware or a package"
