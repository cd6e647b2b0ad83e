"""The matrix's answer to a question: for each backend whether it accepts it, and the checks that passed nearest to it.

A check is near if it differs on few axes. Of two checks, the one whose differences include all of the other's adds
nothing; so the nearest are those whose set of differing axes holds no other check's. No axis weighs more than another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from attn_backends import AttentionBackend
from spec_decode.conformance.report import FAILURES, Report, Result
from spec_decode.matrix.acceptance import Acceptance, Support, by_claims, by_record, needed_tags
from spec_decode.matrix.axes import AT_LEAST, COVERED, SPEC, NotRecorded, Values, axes_of
from spec_decode.matrix.cells import Run, Runs
from spec_decode.matrix.columns import Column, columns_of
from spec_decode.matrix.newest import newest_results, rows_of
from spec_decode.matrix.question import Question
from spec_decode.testing.outcome import Outcome

SCHEMA = "attn-answer/1"
FAMILIES = ("numerics", "drafter", "soak", "graph", "poison", "builder")
"""Families whose checks run a spec, the most telling first. The others say what is declared and what is refused."""


class AxisDifference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An axis on which a check differs from the question. absent: whether only one of the two has it at all, such as a
    window. recorded: whether the report holds the check's value."""

    axis: str
    asked: str
    found: str
    absent: bool = False
    recorded: bool = True


class Near(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checks of one run that differ from the question on the same axes; none if they are exact evidence.

    passed of total: those that ran. check, case, spec: one of them, the nearest by size; spec is empty if not recorded.
    run: index into the answer's runs. failures: check[case]: reason. changed: the modules behind these checks that have
    changed since.
    """

    differences: tuple[AxisDifference, ...]
    passed: int
    total: int
    families: tuple[str, ...]
    check: str
    case: str
    spec: str
    run: int
    failures: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    @property
    def unknown(self) -> bool:
        """Whether nobody can tell how near they are: the report does not record their specs."""
        return any(difference.axis == SPEC for difference in self.differences)


class BackendAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version of a backend on one device. near: exact evidence first, then by the number of differing axes."""

    backend: str
    version: str
    device: str
    acceptance: Acceptance
    near: tuple[Near, ...]

    @property
    def exact(self) -> bool:
        """Whether a check passed on exactly what was asked."""
        return any(not near.differences and near.passed for near in self.near)


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answers of all backends, those with exact evidence first and those that refuse last.

    question: as it was asked. understood: with what it leaves out. needs: the columns of the matrix that it needs, such
    as the features of its kind of attention.
    """

    schema: str = SCHEMA
    question: str
    understood: str
    device: str
    needs: tuple[Column, ...]
    backends: tuple[BackendAnswer, ...]
    runs: tuple[Run, ...]


def answer_question(
    question: Question, reports: Sequence[Report], installed: Mapping[str, AttentionBackend], *, device: str = ""
) -> Answer:
    """Answer a question from these reports.

    installed: the backends that load here, by name. device: part of a device's name, or cpu or cuda; empty for all.
    Raises QuestionError if no spec can have what was asked.
    """
    runs, found = Runs(), []
    for group in rows_of(report for report in reports if not report.engine and is_on(report, device)):
        newest = group[0]
        backend = installed.get(newest.backend)
        says = by_claims(question, group) if backend is None else by_record(question, backend, newest)
        found.append(
            BackendAnswer(
                backend=newest.backend,
                version=newest.version,
                device=newest.env.device,
                acceptance=says,
                near=_near(question, group, runs),
            )
        )
    return Answer(
        question=question.text,
        understood=question.describe(),
        device=device,
        needs=columns_of(needed_tags(question)),
        backends=tuple(sorted(found, key=_order)),
        runs=runs.all,
    )


def _order(found: BackendAnswer) -> tuple[object, ...]:
    differences = min((len(near.differences) for near in found.near if not near.unknown), default=math.inf)
    support = list(Support).index(found.acceptance.support)
    refused = found.acceptance.support is Support.REFUSED
    return refused, not found.exact, support, differences, found.device, found.backend


def is_on(report: Report, device: str) -> bool:
    """Return whether a report is of a device: see `answer_question`."""
    on_cuda = report.env.cuda is not None
    if device.lower() in ("cpu", "cuda"):
        return on_cuda is (device.lower() == "cuda")
    return device.lower() in report.env.device.lower()


@dataclass(frozen=True, slots=True)
class _Seen:
    """A result of a run, with its differences from the question."""

    result: Result
    report: Report
    differences: tuple[AxisDifference, ...]
    distance: float

    @property
    def axes(self) -> frozenset[str]:
        """The axes that differ. A check without a window differs from one with a window in more than its size."""
        absent = (difference.axis for difference in self.differences if difference.absent)
        return frozenset({difference.axis for difference in self.differences} | {f"no {axis}" for axis in absent})

    @property
    def passed(self) -> bool:
        return self.result.outcome is Outcome.PASS


def _near(question: Question, group: Sequence[Report], runs: Runs) -> tuple[Near, ...]:
    by_axes: dict[frozenset[str], list[_Seen]] = {}
    for result, report in newest_results(group):
        if result.family not in FAMILIES or result.outcome not in {Outcome.PASS, Outcome.XFAIL, *FAILURES}:
            continue
        if (values := _comparable(result, question)) is not None:
            differences = _differences(question, values)
            seen = _Seen(result, report, differences, _distance(question, values))
            by_axes.setdefault(seen.axes, []).append(seen)
    proven = [axes for axes, found in by_axes.items() if any(seen.passed for seen in found)]
    nearest = [axes for axes in by_axes if not any(other < axes for other in proven)]
    found = [_merged(seen, runs) for axes in nearest for seen in _by_run(by_axes[axes])]
    return tuple(sorted(found, key=lambda near: (near.unknown, len(near.differences), -near.passed)))


def _comparable(result: Result, question: Question) -> Values | None:
    """Return the axes of a result that can be compared; None if it tells nothing of what was asked."""
    values = axes_of(result)
    covers = any(question.values.get(axis) in values[axis] for axis in COVERED)  # type: ignore[operator]
    return values if SPEC not in values or covers else None


def _differences(question: Question, values: Values) -> tuple[AxisDifference, ...]:
    found = [
        AxisDifference(
            axis=axis,
            asked=_worded(requested),
            found=_worded(value),
            absent=_is_without(axis, requested) is not _is_without(axis, value),
            recorded=not isinstance(value, NotRecorded),
        )
        for axis, requested in question.values.items()
        if axis in values and not _agrees(axis, requested, value := values[axis])
    ]
    if SPEC in values:
        found.append(
            AxisDifference(axis=SPEC, asked="all of these", found="the report does not record it", recorded=False)
        )
    return tuple(found)


def _is_without(axis: str, value: object) -> bool:
    """Return whether an attention has no such thing: no window, no draft, no group."""
    return value is None or value is False or value == frozenset() or (axis == "group" and value == 1)


def _agrees(axis: str, requested: object, value: object) -> bool:
    if isinstance(value, frozenset):
        return requested in value
    if axis in AT_LEAST and isinstance(value, int) and isinstance(requested, int):
        return value >= requested
    return type(value) is not NotRecorded and value == requested


def _worded(value: object) -> str:
    if isinstance(value, NotRecorded):
        return value.text
    if isinstance(value, frozenset):
        return ", ".join(sorted(value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _distance(question: Question, values: Values) -> float:
    """Return how far the sizes of a check are from those asked; a size that is missing counts as far."""
    total = 0.0
    for axis in question.named:
        requested, value = question.values[axis], values.get(axis)
        if isinstance(requested, (int, float)) and not isinstance(requested, bool):
            sized = isinstance(value, (int, float)) and value > 0 and requested > 0
            total += abs(math.log(requested / value)) if sized else 50.0  # type: ignore[operator]
    return total


def _by_run(found: Iterable[_Seen]) -> list[list[_Seen]]:
    runs: dict[int, list[_Seen]] = {}
    for seen in found:
        runs.setdefault(id(seen.report), []).append(seen)
    return list(runs.values())


def _merged(found: Sequence[_Seen], runs: Runs) -> Near:
    nearest = min(found, key=lambda seen: (not seen.passed, seen.distance, FAMILIES.index(seen.result.family)))
    report, result = nearest.report, nearest.result
    return Near(
        differences=nearest.differences,
        passed=sum(seen.passed for seen in found),
        total=len(found),
        families=tuple(dict.fromkeys(seen.result.family for seen in found)),
        check=result.check,
        case=result.case,
        spec="" if result.spec is None else result.spec.spec().describe(),
        run=runs.number(f"{report.backend}@{report.version}", report.env, report.command),
        failures=tuple(
            f"{seen.result.check}[{seen.result.case}]: {seen.result.reason}" for seen in found if not seen.passed
        ),
        changed=report.sources.changed({seen.result.family for seen in found}),
    )


def to_json(found: Answer) -> bytes:
    """Encode in a stable order."""
    return msgspec.json.encode(found) + b"\n"
