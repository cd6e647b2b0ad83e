"""How outcomes and a claim combine in one cell."""

import math

import pytest

from spec_decode.conformance.report import Claim
from spec_decode.matrix.cells import Cell, Status, evidence_of
from tests.spec_decode.matrix.evidence import result

YES, NO = Claim(claimed=True), Claim(claimed=False)
BROKEN, VERIFIED, PARTIAL, CLAIMED = Status.BROKEN, Status.VERIFIED, Status.PARTIAL, Status.CLAIMED
REFUSED, UNCLAIMED, UNKNOWN = Status.REFUSED, Status.UNCLAIMED, Status.UNKNOWN


def seen(*outcomes: str, claim: Claim | None = YES):
    return evidence_of([result(outcome) for outcome in outcomes], claim)


STATUSES = [
    # outcomes; where it is claimed, where it is not, and where no claim was recorded
    ("pass pass", VERIFIED, UNCLAIMED, VERIFIED),
    ("pass unsupported", VERIFIED, UNCLAIMED, VERIFIED),
    ("pass preview unsupported", VERIFIED, UNCLAIMED, VERIFIED),
    *((f"pass pass {bad}", BROKEN, BROKEN, BROKEN) for bad in ("fail", "xpass", "error")),
    *((f"pass {missing}", PARTIAL, UNCLAIMED, PARTIAL) for missing in ("xfail", "not_run", "unavailable")),
    ("xfail xfail", BROKEN, BROKEN, BROKEN),
    ("preview", CLAIMED, UNKNOWN, UNKNOWN),
    ("unsupported unsupported", CLAIMED, REFUSED, REFUSED),
    ("not_run", CLAIMED, UNKNOWN, UNKNOWN),
    ("unavailable", CLAIMED, UNKNOWN, UNKNOWN),
    ("unavailable unsupported", CLAIMED, UNKNOWN, UNKNOWN),
    ("", CLAIMED, UNKNOWN, UNKNOWN),
]


@pytest.mark.parametrize(("outcomes", "claimed", "not_claimed", "unsaid"), STATUSES)
def test_outcomes_and_claim_give_status(outcomes, claimed, not_claimed, unsaid):
    found = [seen(*outcomes.split(), claim=claim).status for claim in (YES, NO, None)]
    assert found == [claimed, not_claimed, unsaid]


@pytest.mark.parametrize(
    ("outcomes", "counts", "notes"),
    [
        ("pass pass xfail unsupported", (2, 3, 1), ["xfail"]),
        ("pass preview unsupported", (1, 1, 1), ["preview"]),
        ("pass unsupported", (1, 1, 1), []),
        ("xfail pass fail", (1, 3, 0), ["fail", "xfail"]),
        ("pass unavailable not_run", (1, 1, 0), ["unavailable", "not_run"]),
    ],
)
def test_counts_exclude_refusals_and_notes_start_with_failures(outcomes, counts, notes):
    found = seen(*outcomes.split())
    assert (found.passed, found.total, found.refused) == counts
    assert [note.outcome for note in found.notes] == notes


@pytest.mark.parametrize(
    ("values", "worst"), [((0.1, 0.4, 0.2), 0.4), ((math.nan, 0.5), None), ((0.5, math.nan), None)]
)
def test_worst_error_is_largest_or_nan(values, worst):
    found = evidence_of([result("pass", evidence={"error_over_budget": value}) for value in values], YES)
    if worst is None:
        assert found.worst is not None and math.isnan(found.worst)
    else:
        assert found.text == "verified 3/3 0.4x"


def test_equal_reasons_become_one_note_shortest_first():
    reasons = ["no sinks; no window", *["no sinks"] * 14]
    refusals = [result("unsupported", reason=reason, case=str(n)) for n, reason in enumerate(reasons)]
    notes = evidence_of(refusals).notes
    assert [(note.reason, note.case, note.count) for note in notes] == [("no sinks", "1", 14), (reasons[0], "0", 1)]


def test_cell_without_results_shows_no_number():
    assert seen("not_run", claim=NO).text == "unknown"
    claimed = Cell(status=CLAIMED, claim=Claim(claimed=True, level="in graph"))
    assert claimed.text == "claimed (in graph)"


def test_evidence_of_older_source_is_marked():
    texts = [evidence_of([result(outcome)], YES, changed=("m",)).text for outcome in ("pass", "unsupported")]
    assert texts == ["verified 1/1*", "claimed*"]
