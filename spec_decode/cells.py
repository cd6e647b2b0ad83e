"""One cell of the compatibility matrix: claim and evidence, kept apart, and the word they earn."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec

from spec_decode.report import FAILURES, Outcome, Result


class Word(str, Enum):
    """The one word of a cell."""

    VERIFIED = "verified"
    CLAIMED = "claimed"
    REFUSED = "refused"
    BROKEN = "broken"
    PARTIAL = "partial"
    UNCLAIMED = "unclaimed"
    UNKNOWN = "unknown"


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a backend says of itself for one column. words: the claim itself, or why it makes none."""

    claimed: bool
    words: str = ""


class Note(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why some of a cell's checks did not pass: equal reasons once, with the first check and its command."""

    outcome: str
    reason: str
    check: str
    case: str
    repro: str
    count: int


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Claim and evidence of one column. The numbers are None where nothing was run.

    total counts every check but the refused ones; worst is the largest error as a multiple of its budget.
    """

    word: Word
    claim: Claim | None = None
    passed: int | None = None
    total: int | None = None
    worst: float | None = None
    notes: tuple[Note, ...] = ()

    @property
    def text(self) -> str:
        """The word, the count and the worst error."""
        count = f" {self.passed}/{self.total}" if self.total is not None else ""
        worst = f" {self.worst:.2g}x" if self.worst is not None else ""
        claim = f" ({self.claim.words})" if self.claim is not None and self.claim.words else ""
        return f"{self.word.value}{count}{worst}{claim}"


def cell_of(results: Sequence[Result], claim: Claim | None = None) -> Cell:
    """The cell for the results of one column."""
    outcomes = [result.outcome for result in results]
    word, notes = _word(outcomes, claim), _notes(results)
    if word in (Word.UNKNOWN, Word.CLAIMED, Word.REFUSED):
        return Cell(word=word, claim=claim, notes=notes)
    errors = [r.evidence["error_over_budget"] for r in results if "error_over_budget" in r.evidence]
    return Cell(
        word=word,
        claim=claim,
        passed=outcomes.count(Outcome.PASS),
        total=len(outcomes) - outcomes.count(Outcome.UNSUPPORTED),
        # A NaN is worse than any number, and max() alone would lose it.
        worst=max(errors, key=lambda error: (error != error, error), default=None),
        notes=notes,
    )


def _word(outcomes: Sequence[Outcome], claim: Claim | None) -> Word:
    seen = set(outcomes)
    if seen & FAILURES or (Outcome.XFAIL in seen and Outcome.PASS not in seen):
        return Word.BROKEN
    if Outcome.PASS in seen:
        if claim is not None and not claim.claimed:
            return Word.UNCLAIMED
        return Word.VERIFIED if seen <= {Outcome.PASS, Outcome.UNSUPPORTED} else Word.PARTIAL
    if seen == {Outcome.UNSUPPORTED}:
        return Word.REFUSED
    return Word.CLAIMED if claim is not None and claim.claimed else Word.UNKNOWN


def _notes(results: Sequence[Result]) -> tuple[Note, ...]:
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        if result.outcome is not Outcome.PASS:
            groups.setdefault((result.outcome.value, result.reason), []).append(result)
    return tuple(
        Note(
            outcome=outcome,
            reason=reason,
            check=group[0].check,
            case=group[0].case,
            repro=group[0].repro,
            count=len(group),
        )
        for (outcome, reason), group in groups.items()
    )
