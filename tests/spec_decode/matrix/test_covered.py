"""What the passed checks of a backend covered together."""

from spec_decode.matrix.covered import covered, shown
from tests.spec_decode.matrix.evidence import report, result
from tests.spec_decode.matrix.test_matrix_answer import SPEC, seen, unrecorded

WINDOW = "feature:sliding_window"


def columns(*results, **fields):
    (found,) = covered([report(*results, **fields)], "k").backends
    return {each.column.tag: each for each in found.columns}


def test_column_lists_specs_that_ran_with_it():
    bf16 = seen(SPEC, "pass", "dtype:bfloat16", case="bf16", sliding_window=None)
    wide = seen(SPEC, "pass", WINDOW, case="window", page_size=64, sliding_window=17)
    found = columns(bf16, wide, seen(SPEC, "fail", WINDOW, case="other", page_size=1))
    assert (found[WINDOW].values["page"], found[WINDOW].values["window"]) == (("64",), ("17",))
    assert found["dtype:bfloat16"].values["window"] == ("none",) and found[WINDOW].passed == 1
    assert found[WINDOW].values["rows"] == ("7",) and found[WINDOW].values["length"] == ("142",)


def test_claim_without_passed_check_is_listed():
    found = columns(seen(SPEC, "pass", WINDOW), claims={"page:64": True, "page:1": False})
    assert (found["page:64"].passed, found["page:64"].claimed, found["page:64"].values) == (0, True, {})
    assert "page:1" not in found


def test_report_without_specs_marks_unrecorded_axes():
    found = columns(unrecorded())[WINDOW]
    assert found.values["page"] == ("16",) and "window" in found.unrecorded
    assert (shown(found, "window"), shown(found, "dtype")) == ("?", "bfloat16")


def test_many_sizes_are_shown_as_a_range():
    sizes = [seen(SPEC, "pass", WINDOW, case=str(n), sliding_window=n) for n in (1, 2, 3, 5, 8, 13, 4096)]
    assert shown(columns(*sizes)[WINDOW], "window") == "1 to 4096 (7 values)"
    assert shown(columns(*sizes[:3])[WINDOW], "window") == "1, 2, 3"


def test_passed_refusal_covers_nothing():
    assert not columns(result("pass", "page:16", check="refusal.unclaimed_is_refused"))
