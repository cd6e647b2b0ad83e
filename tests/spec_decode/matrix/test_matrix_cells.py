import math

import pytest

from spec_decode.conformance.report import Claim
from spec_decode.matrix.cells import Cell, Status, evidence_of
from tests.spec_decode.matrix.evidence import result

YES, NO = Claim(claimed=True), Claim(claimed=False)


def seen(*outcomes: str, claim: Claim | None = YES):
    return evidence_of([result(outcome) for outcome in outcomes], claim)


@pytest.mark.parametrize("bad", ["fail", "xpass", "error"])
@pytest.mark.parametrize("claim", [YES, NO, None])
def test_one_failure_breaks_whatever_is_claimed(bad, claim):
    assert seen("pass", "pass", bad, claim=claim).status is Status.BROKEN


def test_only_passes_verify_a_claim():
    assert seen("pass", "pass").status is Status.VERIFIED


def test_refused_cases_beside_passes_leave_it_verified():
    assert seen("pass", "unsupported").status is Status.VERIFIED


def test_a_failed_preview_beside_passes_leaves_it_verified_with_a_note():
    found = seen("pass", "preview", "unsupported")
    assert (found.status, found.passed, found.total) == (Status.VERIFIED, 1, 1)
    assert [note.outcome for note in found.notes] == ["preview"]


@pytest.mark.parametrize(("claim", "word"), [(YES, Status.CLAIMED), (NO, Status.UNKNOWN), (None, Status.UNKNOWN)])
def test_a_failed_preview_alone_proves_nothing(claim, word):
    assert seen("preview", claim=claim).status is word


@pytest.mark.parametrize("missing", ["xfail", "not_run", "unavailable"])
def test_passes_with_something_missing_are_partial(missing):
    assert seen("pass", missing).status is Status.PARTIAL


def test_known_failures_without_a_pass_are_broken():
    assert seen("xfail", "xfail").status is Status.BROKEN


def test_refusals_of_what_is_not_claimed_are_refused():
    assert seen("unsupported", "unsupported", claim=NO).status is Status.REFUSED


def test_refusals_where_no_claim_was_recorded_are_refused():
    assert seen("unsupported", claim=None).status is Status.REFUSED


def test_refusals_of_what_is_claimed_leave_it_a_claim():
    assert seen("unsupported").status is Status.CLAIMED


@pytest.mark.parametrize("outcomes", [("not_run",), ("unavailable",), ("unavailable", "unsupported")])
def test_where_nothing_ran_nothing_is_known_and_there_is_no_number(outcomes):
    found = seen(*outcomes, claim=NO)
    assert found.status is Status.UNKNOWN and found.text == "unknown"


def test_passes_of_what_is_not_claimed_are_unclaimed():
    assert seen("pass", claim=NO).status is Status.UNCLAIMED


def test_the_count_leaves_refused_cases_out():
    found = seen("pass", "pass", "xfail", "unsupported")
    assert (found.passed, found.total, found.refused) == (2, 3, 1)


def test_the_worst_error_is_the_largest():
    errors = [result("pass", evidence={"error_over_budget": value}) for value in (0.1, 0.4, 0.2)]
    assert evidence_of(errors, YES).text == "verified 3/3 0.4x"


@pytest.mark.parametrize("values", [(math.nan, 0.5), (0.5, math.nan)])
def test_a_nan_is_the_worst_error(values):
    worst = evidence_of([result("fail", evidence={"error_over_budget": value}) for value in values]).worst
    assert worst is not None and math.isnan(worst)


def test_equal_reasons_become_one_note_with_a_count():
    notes = evidence_of([result("unsupported", reason="no sinks", case=str(n)) for n in range(14)]).notes
    assert [(note.case, note.count) for note in notes] == [("0", 14)]


def test_failures_are_told_before_known_failures():
    assert [note.outcome for note in seen("xfail", "pass", "fail").notes] == ["fail", "xfail"]


def test_the_shortest_refusal_is_told_first():
    refusals = [result("unsupported", reason=reason) for reason in ("no sinks; no window", "no sinks")]
    assert [note.reason for note in evidence_of(refusals).notes] == ["no sinks", "no sinks; no window"]


def test_refusals_beside_passes_are_counted_and_not_told():
    assert seen("pass", "unsupported").notes == ()


def test_a_claim_without_a_run_is_claimed_with_its_level():
    assert Cell.of(Claim(claimed=True, level="in graph"), []).text == "claimed (in graph)"


def test_no_claim_and_no_run_is_unknown():
    assert Cell.of(None, []).status is Status.UNKNOWN and Cell.of(NO, []).status is Status.UNKNOWN


def test_runs_that_disagree_are_both_told_newest_first():
    cell = Cell.of(YES, [seen("pass"), seen("fail"), seen("pass", "pass")])
    assert cell.conflict and cell.status is Status.VERIFIED
    assert cell.text == "verified 1/1; earlier broken 0/1"


def test_runs_that_agree_are_told_once():
    cell = Cell.of(YES, [seen("pass"), seen("pass", "pass")])
    assert not cell.conflict and cell.text == "verified 1/1"
