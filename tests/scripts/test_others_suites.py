"""Rows and verdict of others' suites; the suites themselves run in an engine's Python."""

from enum import Enum

import pytest

from scripts.others_suites import Row, failures, run
from scripts.sglang_suite import slot_of
from scripts.vllm_suite import renamed

SUITE = """
import pytest

@pytest.fixture
def attend(request):
    request.node.user_properties.append(("reached", True))

@pytest.mark.parametrize("ours", ["A"])
class TestOurs:
    def test_pass(self, ours, attend): pass
    def test_fail(self, ours, attend): assert ours == "B", "wrong by 3"
    def test_skip(self, ours): pytest.skip("no card")
    @pytest.mark.skipif(True, reason="by mark")
    def test_marked(self, ours): pass
    def test_refused(self, ours, attend): raise ValueError("A cannot serve this layer: it has sinks")
    def test_not_written(self, ours, attend): raise NotImplementedError("no encoders")
    def test_not_reached(self, ours): pass
    def test_broken(self, ours, absent): pass
"""


def test_every_case_has_outcome_and_reason(tmp_path):
    (tmp_path / "test_theirs.py").write_text(SUITE)
    rows = run([tmp_path / "test_theirs.py"], tmp_path)
    found = {row.test.removesuffix("[A]").removeprefix("test_"): (row.outcome, row.reason) for row in rows}
    assert {(row.suite, row.backend) for row in rows} == {("test_theirs.py", "A")}
    assert found["fail"][0] == found["broken"][0] == "fail" and "wrong by 3" in found["fail"][1]
    assert "absent" in found["broken"][1]
    assert found["skip"] == ("skip", "no card") and found["marked"] == ("skip", "by mark")
    assert found["refused"] == ("refused", "ValueError: A cannot serve this layer: it has sinks")
    assert found["not_written"] == ("refused", "NotImplementedError: no encoders")
    assert found["pass"] == ("pass", "") and found["not_reached"][0] == "not run" and len(rows) == 8


@pytest.mark.parametrize(
    ("outcome", "wrong"),
    [("pass", []), ("fail", ["t: by 3"]), *((each, ["no case ran A"]) for each in ("skip", "refused", "not run"))],
)
def test_failed_case_and_idle_name_are_told(outcome, wrong):
    found = failures([Row("s", "t", "A", outcome, "by 3")], ["A"])
    assert [each.partition(";")[0] for each in found] == wrong
    [unselected] = failures([], ["A"])
    assert unselected == "no case ran A; -k selects none of its cases"


def test_only_the_name_is_replaced():
    names = Enum("Names", ["THEIRS", "OTHER", "OURS"])
    found = renamed(names, "THEIRS", "OURS")
    assert (found.THEIRS, found.OTHER, found.OURS) == (names.OURS, names.OTHER, names.OURS)


def test_slots_of_a_request_are_pages_in_another_order():
    slots = [[slot_of(request, at, page_size=16, max_context_len=64) for at in range(64)] for request in range(4)]
    assert sorted(slot for each in slots for slot in each) == list(range(16, 16 + 4 * 64))
    assert all(each != sorted(each) and each[5] == each[0] + 5 for each in slots)
