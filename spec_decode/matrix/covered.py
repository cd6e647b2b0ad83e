"""What the passed checks of a backend covered together: for each column, the values of every axis that ran with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from spec_decode.conformance.report import Report
from spec_decode.matrix.answer import FAMILIES, is_on
from spec_decode.matrix.axes import NotRecorded, Values, axes_of
from spec_decode.matrix.columns import Column, columns_of
from spec_decode.matrix.newest import newest_results, rows_of
from spec_decode.testing.outcome import Outcome

SCHEMA = "attn-covered/1"
AXES = ("dtype", "kv dtype", "page", "dim", "group", "window", "rows", "length")
"""The axes that are counted."""
UNRECORDED = "?"
"""Stands for values that a report does not record."""
_SHOWN = 6
"""Values that are listed; more numbers than these are given by their range."""


class CoveredColumn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One column. claimed: None if the reports have no claim. passed: checks that run a spec. values: by axis, what ran
    with it, as text; numbers ascend. unrecorded: axes of which some check's value is not in its report."""

    column: Column
    claimed: bool | None
    passed: int
    values: dict[str, tuple[str, ...]]
    unrecorded: tuple[str, ...] = ()


class CoveredBackend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version of a backend on one device. dates: of the reports, newest first."""

    backend: str
    version: str
    device: str
    dates: tuple[str, ...]
    columns: tuple[CoveredColumn, ...]


class Covered(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that was covered."""

    schema: str = SCHEMA
    backends: tuple[CoveredBackend, ...]


def covered(reports: Iterable[Report], backend: str, *, device: str = "") -> Covered:
    """Return what the passed checks of a backend, or of an engine's builder, covered. device: see
    `answer_question`."""
    chosen = [report for report in reports if report.backend == backend and is_on(report, device)]
    return Covered(backends=tuple(map(_backend, rows_of(chosen))))


def _backend(group: Sequence[Report]) -> CoveredBackend:
    passed = [result for result, _ in newest_results(group) if result.outcome is Outcome.PASS]
    ran = [(set(result.tags), axes_of(result)) for result in passed if result.family in FAMILIES]
    declared = {tag for result in passed if result.family not in FAMILIES for tag in result.tags}
    claims = {tag: claim.claimed for report in reversed(group) for tag, claim in report.claims.items()}
    covers = {tag for tags, _ in ran for tag in tags}
    untested = {tag for tag, claimed in claims.items() if claimed} - declared
    return CoveredBackend(
        backend=group[0].backend,
        version=group[0].version,
        device=group[0].env.device,
        dates=tuple(report.env.date for report in group),
        columns=tuple(
            _column(column, claims.get(column.tag), [axes for tags, axes in ran if column.tag in tags])
            for column in columns_of(covers | untested)
        ),
    )


def _column(column: Column, claimed: bool | None, passed: Sequence[Values]) -> CoveredColumn:
    seen = {axis: [value for axes in passed for value in _each(axes, axis)] for axis in AXES}
    known = {axis: {value for value in values if not isinstance(value, NotRecorded)} for axis, values in seen.items()}
    return CoveredColumn(
        column=column,
        claimed=claimed,
        passed=len(passed),
        values={axis: tuple(map(_text, sorted(values, key=_rank))) for axis, values in known.items() if values},
        unrecorded=tuple(axis for axis, values in seen.items() if any(isinstance(v, NotRecorded) for v in values)),
    )


def _each(axes: Values, axis: str) -> Iterator[object]:
    value = axes.get(axis, NotRecorded())
    yield from value if isinstance(value, frozenset) else [value]


def _text(value: object) -> str:
    return "none" if value is None else str(value)


def _rank(value: object) -> tuple[bool, float, str]:
    number = value if isinstance(value, int) else 0
    return value is not None, number, str(value)


def shown(found: CoveredColumn, axis: str) -> str:
    """Return the values of an axis as short text."""
    values = found.values.get(axis, ())
    numbers = [value for value in values if value.isdecimal()]
    if len(values) > _SHOWN and numbers:
        others = [value for value in values if not value.isdecimal()]
        values = (*others, f"{numbers[0]} to {numbers[-1]} ({len(numbers)} values)")
    unknown = [UNRECORDED] if axis in found.unrecorded else []
    return ", ".join([*values, *unknown])


def to_json(found: Covered) -> bytes:
    """Encode in a stable order."""
    return msgspec.json.encode(found) + b"\n"
