"""The matrix as data: a row for each version of a backend on a device, from any number of reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from itertools import chain
from typing import NamedTuple

import msgspec

from builders import CONTRACT_VERSION
from spec_decode.conformance.coverage import EVERYTHING
from spec_decode.conformance.report import Claim, Report, Result
from spec_decode.files import json_number
from spec_decode.matrix.cells import Cell, Run, RunEvidence, Runs, Status, evidence_of, status_of
from spec_decode.matrix.columns import Column, columns_of
from spec_decode.matrix.drafters import DraftRow, draft_rows
from spec_decode.matrix.newest import ByCase, disagree, later_results, rows_of
from spec_decode.matrix.sources import Agreement, Timing
from spec_decode.matrix.speed import Section, speed_sections
from spec_decode.testing.outcome import Outcome

SCHEMA = "attn-matrix/5"


class MatrixRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version of a backend on one device.

    package: the other project that declares it, with its version; empty for this project. engine: owner of the builder,
    with its version; empty for a backend. runs: indices of its reports, newest first. stale: why the row may no longer
    hold. cells: by the tag of their column.
    """

    backend: str
    version: str
    package: str = ""
    engine: str = ""
    device: str
    runs: tuple[int, ...]
    stale: tuple[str, ...]
    cells: dict[str, Cell]

    @property
    def title(self) -> str:
        return _title(self)

    @property
    def absent(self) -> str:
        """Why it could not be loaded, if nothing else was observed; else empty."""
        notes = [note for cell in self.cells.values() for evidence in cell.evidence for note in evidence.notes]
        reasons = {note.reason if note.outcome == Outcome.UNAVAILABLE.value else "" for note in notes}
        unknown = all(cell.status is Status.UNKNOWN and cell.claim is None for cell in self.cells.values())
        return reasons.pop() if unknown and len(reasons) == 1 else ""


class Matrix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the pages show. runs: the source of each piece of evidence, which refers to them by index."""

    schema: str = SCHEMA
    columns: tuple[Column, ...]
    rows: tuple[MatrixRow, ...]
    strategies: tuple[str, ...]
    drafters: tuple[DraftRow, ...]
    speed: tuple[Section, ...]
    runs: tuple[Run, ...]


def _title(row: MatrixRow | Report) -> str:
    return f"{row.engine}: {row.backend}" if row.engine else f"{row.backend}@{row.version}"


def build_matrix(
    reports: Sequence[Report],
    agreements: Sequence[Agreement] = (),
    timings: Sequence[Timing] = (),
    *,
    tags: Sequence[str] = (),
    current: Mapping[str, str] | None = None,
) -> Matrix:
    """Build the matrix of these reports: rows by device and backend, nothing averaged, nothing dropped.

    tags: only the columns that match one of these patterns. current: the versions that backends have now; a row of
    another version is marked stale.
    """
    runs = Runs()
    columns = columns_of(tag for tag in tags_of(reports) if not tags or any(fnmatch(tag, pattern) for pattern in tags))
    newest: dict[tuple[str, str], Report] = {}
    for report in sorted(reports, key=lambda report: report.env.date, reverse=True):
        newest.setdefault((report.env.device, report.backend), report)
    rows = []
    for group in rows_of(reports):
        stale = _stale(group[0], newest[group[0].env.device, group[0].backend], (current or {}).get(group[0].backend))
        rows.append(_row(group, columns, runs, stale))
    drafters = draft_rows(agreements, timings, runs)
    return Matrix(
        columns=columns,
        rows=tuple(rows),
        strategies=tuple(dict.fromkeys(cell.strategy for row in drafters for cell in row.cells)),
        drafters=drafters,
        speed=speed_sections(timings, runs),
        runs=runs.all,
    )


def tags_of(reports: Iterable[Report]) -> set[str]:
    """Return every tag that these reports have a claim or a result for."""
    return {tag for report in reports for tag in chain(report.claims, *map(_tags_of, report.results))}


def _tags_of(result: Result) -> tuple[str, ...]:
    """Return its tags; a result without tags, such as another kit's, counts for its family, so none is lost."""
    return result.tags or (f"family:{result.family}",)


def _row(reports: Sequence[Report], columns: Sequence[Column], runs: Runs, stale: tuple[str, ...]) -> MatrixRow:
    newest = reports[0]
    seen = [
        _Seen(each, _by_tag(each.results), later, runs.number(_title(newest), each.env, each.command))
        for each, later in zip(reports, later_results(reports), strict=True)
    ]
    return MatrixRow(
        backend=newest.backend,
        version=newest.version,
        package=newest.package,
        engine=newest.engine,
        device=newest.env.device,
        runs=tuple(each.run for each in seen),
        stale=stale,
        cells={column.tag: _cell(column.tag, seen, _repro(newest, column.tag)) for column in columns},
    )


def _repro(report: Report, tag: str) -> str:
    """Return the command that checks a column of a row again."""
    if report.engine:
        return f"attn-backends check --engine {report.engine.partition(' ')[0]} {report.backend}"
    where = "cpu" if report.env.cuda is None else "cuda"
    return f"attn-backends matrix --run {report.backend} --device {where} --tag {tag}"


def _by_tag(results: Iterable[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for result in results:
        for tag in _tags_of(result):
            found.setdefault(tag, []).append(result)
    return found


class _Seen(NamedTuple):
    """What one report saw. later: see `later_results`."""

    report: Report
    by_tag: dict[str, list[Result]]
    later: ByCase
    run: int


def _cell(tag: str, seen: Sequence[_Seen], repro: str) -> Cell:
    claims = [claim for each in seen if (claim := _claim(each.report, tag))]
    kept: list[RunEvidence] = []
    earlier: list[RunEvidence] = []
    newest: list[Result] = []
    conflict = False
    for report, by_tag, later, run in seen:
        found = by_tag.get(tag) or by_tag.get(EVERYTHING) or ()
        by_age: dict[bool, list[Result]] = {False: [], True: []}
        for result in found:
            repeated = later.get((result.check, result.case))
            by_age[repeated is not None].append(result)
            conflict |= disagree(result, repeated)
        newest += by_age[False]
        for entries, results in ((kept, by_age[False]), (earlier, by_age[True])):
            if results:
                changed = _changed(report, results)
                entries.append(evidence_of(results, _claim(report, tag), run, changed=changed, repro=report.repro))
    claim = claims[0] if claims else None
    return Cell(
        status=status_of(newest, claim),
        claim=claim,
        evidence=tuple(sorted(kept, key=lambda found: -(found.total or 0))),
        earlier=tuple(earlier),
        conflict=conflict,
        repro=repro,
    )


def _changed(report: Report, results: Sequence[Result]) -> tuple[str, ...]:
    return report.sources.changed({result.family for result in results})


def _claim(report: Report, tag: str) -> Claim | None:
    return report.claims.get(tag) or report.claims.get(EVERYTHING)


def _stale(report: Report, later: Report, installed: str | None) -> tuple[str, ...]:
    """Return why a row may no longer hold: another version was checked later or is installed, or a newer contract."""
    reasons = []
    if later.version != report.version:
        reasons.append(f"version {later.version} was checked on this device later, on {later.env.date[:10]}")
    if installed not in (None, report.version):
        reasons.append(f"version {installed} is installed now")
    contract = ".".join(map(str, CONTRACT_VERSION))
    if report.contract not in ("", contract):
        reasons.append(f"it was built for contract {report.contract}, but the library is at {contract} now")
    return tuple(reasons)


def to_json(matrix: Matrix) -> bytes:
    """Encode in a stable order; a non-finite worst error is written by name."""
    document = msgspec.to_builtins(matrix)
    for row in document["rows"]:
        for cell in row["cells"].values():
            for evidence in (*cell["evidence"], *cell["earlier"]):
                evidence["worst"] = None if evidence["worst"] is None else json_number(evidence["worst"])
    return msgspec.json.encode(document) + b"\n"
