"""One cell of the compatibility matrix: separate claim and evidence, their status, and the runs behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import msgspec

from spec_decode.conformance.report import FAILURES, Claim, Number, Result
from spec_decode.environment import Environment
from spec_decode.testing.outcome import Outcome

OLDER = "*"
"""Appended to observations made with older source than the current one."""


_NOT_COUNTED = {Outcome.UNSUPPORTED, Outcome.PREVIEW, Outcome.UNAVAILABLE, Outcome.NOT_RUN}
"""Rejections, failed previews, and checks that did not run."""


class Status(str, Enum):
    """The combined status of a cell's claim and checks; each member has its mark and its meaning."""

    VERIFIED = "verified", "✓", "claimed, and every check that covers it passed"
    CLAIMED = "claimed", "?", "claimed, but no check that covers it ran"
    REFUSED = "refused", "–", "not claimed, and rejected with a reason"
    BROKEN = "broken", "✗", "at least one check that covers it failed"
    PARTIAL = "partial", "~", "passes, except for known failures or checks that could not run"
    UNCLAIMED = "unclaimed", "+", "passes, but is not claimed"
    UNKNOWN = "unknown", "·", "not claimed and not checked, or the checks could not run"

    mark: str
    meaning: str

    def __new__(cls, value: str, mark: str, meaning: str) -> Status:
        status = str.__new__(cls, value)
        status._value_, status.mark, status.meaning = value, mark, meaning
        return status


class Note(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why some checks of a cell did not pass: equal reasons are merged, with the first check and its command."""

    outcome: str
    reason: str
    check: str
    case: str
    repro: str
    count: int


class RunEvidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one run observed for one column.

    run: index into the matrix's runs. passed of total: checks that ran, excluding rejections and failed previews; both
    None if there are none. refused: cases that were not claimed. worst: the largest error as a multiple of its budget.
    changed: the modules behind these checks that have changed since.
    """

    run: int
    status: Status
    passed: int | None = None
    total: int | None = None
    refused: int = 0
    worst: Number | None = None
    notes: tuple[Note, ...] = ()
    changed: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The status with the numbers, and a mark if the source is older."""
        return _text(self.status, [self])

    @property
    def numbers(self) -> str:
        """The count, the worst error, and a mark if the source is older; empty if no check ran."""
        worst = f" {self.worst:.2g}x" if self.worst is not None else ""
        return f"{self.passed}/{self.total}{worst}{OLDER if self.changed else ''}" if self.total else ""


def _text(status: Status, evidence: Sequence[RunEvidence]) -> str:
    numbers = " + ".join(filter(None, (found.numbers for found in evidence)))
    changed = any(found.changed for found in evidence)
    return f"{status.value} {numbers}" if numbers else f"{status.value}{OLDER if changed else ''}"


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Claim and evidence of one column. evidence: an entry for each run with the newest result of some check, the run
    with most of them first; never an average. earlier: an entry for each run whose checks a later run repeated.

    status: from the newest result of each check; without any, from the claim. claim: None if no report recorded one.
    conflict: whether the same check had other outcomes in runs of the same version on the same device. repro: the
    command that checks this column again.
    """

    status: Status
    claim: Claim | None = None
    evidence: tuple[RunEvidence, ...] = ()
    earlier: tuple[RunEvidence, ...] = ()
    conflict: bool = False
    repro: str = ""

    @property
    def text(self) -> str:
        """The status with the observations of each run, earlier ones that differ, and the level claimed."""
        differing = (found.text for found in self.earlier if self.conflict and found.status is not self.status)
        texts = dict.fromkeys([_text(self.status, self.evidence), *differing])
        return "; earlier ".join(texts) + (f" ({self.level})" if self.level else "")

    @property
    def level(self) -> str:
        """The level claimed, if the claim has degrees."""
        return self.claim.level if self.claim is not None else ""


def evidence_of(
    results: Sequence[Result],
    claim: Claim | None = None,
    run: int = 0,
    *,
    changed: tuple[str, ...] = (),
    repro: Callable[[str, str], str] | None = None,
) -> RunEvidence:
    """Combine one run's results in one column (at least one). repro: returns the command that repeats a check on a
    case."""
    outcomes = [result.outcome for result in results]
    refused = outcomes.count(Outcome.UNSUPPORTED)
    status = status_of(results, claim)
    if status in (Status.UNKNOWN, Status.CLAIMED, Status.REFUSED):
        # A case that requests several things is rejected for all of them: the shortest reason is the most specific.
        notes = sorted(_notes(results, repro), key=lambda note: len(note.reason))
        return RunEvidence(run=run, status=status, refused=refused, notes=tuple(notes), changed=changed)
    errors = [r.evidence["error_over_budget"] for r in results if "error_over_budget" in r.evidence]
    return RunEvidence(
        run=run,
        status=status,
        passed=outcomes.count(Outcome.PASS),
        total=sum(outcome not in _NOT_COUNTED for outcome in outcomes),
        refused=refused,
        # NaN is worse than any number; max() alone would lose it.
        worst=max(errors, key=lambda error: (error != error, error), default=None),
        notes=_notes([result for result in results if result.outcome is not Outcome.UNSUPPORTED], repro),
        changed=changed,
    )


def status_of(results: Iterable[Result], claim: Claim | None) -> Status:
    """Combine a claim with the results of the checks that cover it."""
    seen = {result.outcome for result in results}
    claimed = claim is not None and claim.claimed
    if seen & FAILURES or (Outcome.XFAIL in seen and Outcome.PASS not in seen):
        return Status.BROKEN
    if Outcome.PASS in seen:
        if claim is not None and not claimed:
            return Status.UNCLAIMED
        return Status.VERIFIED if seen <= {Outcome.PASS, Outcome.UNSUPPORTED, Outcome.PREVIEW} else Status.PARTIAL
    if claimed:
        return Status.CLAIMED
    return Status.REFUSED if seen == {Outcome.UNSUPPORTED} else Status.UNKNOWN


def _notes(results: Sequence[Result], repro: Callable[[str, str], str] | None) -> tuple[Note, ...]:
    """Return the notes, failures first."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in sorted(results, key=lambda result: result.outcome not in FAILURES):
        if result.outcome is not Outcome.PASS:
            groups.setdefault((result.outcome.value, result.reason), []).append(result)
    return tuple(
        Note(
            outcome=outcome,
            reason=why,
            check=first.check,
            case=first.case,
            repro=repro(first.check, first.case) if repro else "",
            count=1 + len(more),
        )
        for (outcome, why), (first, *more) in groups.items()
    )


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of a tool: its subject, where, when, and how to repeat it."""

    subject: str
    env: Environment
    command: str

    @property
    def commit(self) -> str:
        """The short hash, whether the tree was dirty, and whether this was stated instead of read from git."""
        stated = f" ({self.env.stated})" if self.env.stated else ""
        if self.env.commit.startswith("unknown"):
            return self.env.commit + stated
        dirty = {True: " dirty", False: "", None: " (dirty or not: unknown)"}[self.env.dirty]
        return self.env.commit[:12] + dirty + stated


class Runs:
    """Collects distinct runs and numbers them in order of first use."""

    def __init__(self) -> None:
        self._numbers: dict[Run, int] = {}

    @property
    def all(self) -> tuple[Run, ...]:
        return tuple(self._numbers)

    def number(self, subject: str, env: Environment, command: str) -> int:
        run = Run(subject=subject, env=env, command=command)
        return self._numbers.setdefault(run, len(self._numbers))
