import math
import os
from pathlib import Path

import msgspec
import pytest

from spec_decode.conformance.report import Claim, ConformanceFailure, Report, Result
from spec_decode.environment import Environment
from spec_decode.files import ReportError, parse_json, report_bytes
from spec_decode.source_digests import SourceRecord
from spec_decode.testing.outcome import Outcome

ENV = Environment(
    device="NVIDIA H200",
    torch="2.13.0",
    triton="3.7.1",
    python="3.11.7",
    commit="a" * 40,
    dirty=False,
    date="2026-01-02T03:04:05+00:00",
    driver="580.1",
    cuda="13.0",
    platform="Linux",
)


CLAIM = Claim(claimed=True)


def result(outcome: str = "pass", **fields) -> Result:
    given = {"check": "graph.replay", "case": "decode"}
    return Result(**{**given, **fields}, outcome=Outcome(outcome))


def report(*results: Result) -> Report:
    return Report(backend="mykernel", version="1.2", env=ENV, command="attn-backends check", results=results)


def of(**outcomes: int) -> Report:
    return report(*(result(name, case=f"{name}-{n}") for name, count in outcomes.items() for n in range(count)))


def written(tmp_path: Path, change=lambda document: None) -> Path:
    document = of(**{"pass": 2}).document()
    change(document)
    path = tmp_path / "report.json"
    path.write_bytes(report_bytes(document))
    return path


@pytest.mark.parametrize("family", ["builder", "numerics"])
def test_passes_beside_families_that_refuse_every_spec_are_not_ok(family):
    refused = [result("unsupported", check=f"{check}.holds") for check in ("builder", "numerics")]
    declared = result(check="contract.holds")
    found = report(declared, *refused)
    assert not found.ok
    with pytest.raises(ConformanceFailure, match="no builder or numerics check passed, so nothing is proven"):
        found.raise_if_failed()
    assert report(declared, *refused, result(check=f"{family}.holds", case="other")).ok


def test_a_run_that_asked_for_neither_of_these_families_is_ok_without_them():
    assert report(result(check="contract.holds")).ok


def test_counts_name_every_outcome_in_order():
    counts = of(**{"pass": 2, "error": 1}).counts
    assert list(counts) == [
        "pass",
        "fail",
        "xfail",
        "xpass",
        "unsupported",
        "unavailable",
        "error",
        "preview",
        "not_run",
    ]
    assert counts["pass"] == 2 and counts["error"] == 1 and sum(counts.values()) == 3


def test_zero_checks_are_not_ok():
    assert not report().ok


def test_refusals_alone_are_not_ok():
    assert not of(unsupported=3, unavailable=1).ok


@pytest.mark.parametrize("outcome", ["fail", "xpass", "error", "not_run"])
def test_one_bad_outcome_is_not_ok(outcome):
    assert not of(**{"pass": 9, outcome: 1}).ok


@pytest.mark.parametrize("outcome", ["xfail", "unsupported", "unavailable"])
def test_an_expected_outcome_beside_a_pass_is_ok(outcome):
    assert of(**{"pass": 1, outcome: 4}).ok


def test_the_summary_is_one_line_with_the_counts_and_the_place():
    assert of(**{"pass": 205, "xfail": 3, "unsupported": 14, "unavailable": 9}).summary() == (
        "mykernel: 231 checks = 205 pass, 3 xfail, 14 unsupported, 9 unavailable, 0 not_run (H200, torch 2.13.0)"
    )


def test_the_summary_says_zero_passes():
    assert "1 checks = 0 pass, 1 fail, 0 not_run" in of(fail=1).summary()


def test_an_ok_report_raises_nothing():
    of(**{"pass": 1}).raise_if_failed()


def test_a_failure_names_the_check_the_reason_and_the_command():
    bad = result("fail", case="verify", reason="slot 64 was written twice")
    with pytest.raises(ConformanceFailure) as caught:
        report(result(), bad).raise_if_failed()
    message = str(caught.value)
    assert "fail: graph.replay[verify]: slot 64 was written twice" in message
    assert "attn-backends check mykernel --device cuda --only 'graph.replay*verify*'" in message


def test_failures_are_whatever_makes_a_report_not_ok():
    bad = [result(outcome, case=outcome) for outcome in ("fail", "error", "xpass", "not_run")]
    fine = [result(outcome, case=outcome) for outcome in ("pass", "unsupported", "xfail", "preview", "unavailable")]
    assert report(*fine, *bad).failures == tuple(bad)
    assert report(*fine).failures == () and report(*fine).ok


def test_a_failure_of_an_empty_run_says_that_nothing_passed():
    with pytest.raises(ConformanceFailure, match="no check passed"):
        report().raise_if_failed()


def test_a_long_failure_is_cut_with_a_count():
    with pytest.raises(ConformanceFailure, match="and 20 more"):
        of(fail=30).raise_if_failed()


def test_the_json_has_exactly_the_documented_fields():
    full = report(result(tags=("page:16",), evidence={"error": 0.5}), result("fail", case="prefill", reason="wrong"))
    full = msgspec.structs.replace(full, package="p 1", engine="e 2", contract="1.0", claims={"page:16": CLAIM})
    full = msgspec.structs.replace(full, sources=SourceRecord.of({"graph": ["builders.errors"]}))
    document = parse_json(full.to_json(), "full")
    assert list(document) == [
        *("schema", "backend", "version", "package", "engine", "contract", "env", "command", "sources", "claims"),
        *("columns", "results", "digest"),
    ]
    assert list(document["env"]) == [
        *("device", "torch", "triton", "python", "commit", "dirty", "date", "driver", "cuda", "platform", "stated"),
        "packages",
    ]
    assert document["schema"] == "attn-report/5" and list(document["sources"]) == ["modules", "parts"]
    assert document["columns"] == ["page:16"]
    of_both = {"check": "graph.replay", "seconds": 0.0}
    assert document["results"] == [
        {**of_both, "case": "decode", "outcome": "pass", "evidence": {"error": 0.5}, "columns": [0]},
        {**of_both, "case": "prefill", "outcome": "fail", "reason": "wrong", "columns": []},
    ]


def test_the_json_is_one_line():
    assert of(**{"pass": 3}).to_json().count(b"\n") == 1


def test_an_edited_report_is_refused(tmp_path):
    path = tmp_path / "report.json"
    path.write_bytes(of(fail=1).to_json().replace(b'"fail"', b'"pass"'))
    with pytest.raises(ReportError, match=r"report\.json was changed after it was written: its digest does not fit"):
        Report.load(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["a pipe", "a folder"])
def test_what_is_no_file_is_refused_at_once(tmp_path, make):
    make(tmp_path / "r.json")
    with pytest.raises(ReportError, match="is no regular file"):
        Report.load(tmp_path / "r.json")


def test_the_json_does_not_depend_on_the_order_evidence_came_in():
    assert (
        report(result(evidence={"a": 1.0, "b": 2.0})).to_json()
        == report(result(evidence={"b": 2.0, "a": 1.0})).to_json()
    )


def test_non_finite_evidence_is_written_by_name():
    [row] = report(result(evidence={"a": math.nan, "b": math.inf, "c": -math.inf})).document()["results"]
    assert row["evidence"] == {"a": "nan", "b": "inf", "c": "-inf"}


def test_non_finite_evidence_survives_a_round_trip(tmp_path):
    report(result(evidence={"a": math.nan, "b": math.inf, "c": -math.inf})).save(tmp_path / "r.json")
    evidence = Report.load(tmp_path / "r.json").results[0].evidence
    assert math.isnan(evidence["a"]) and evidence["b"] == math.inf and evidence["c"] == -math.inf


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -0.5])
def test_seconds_that_are_no_duration_are_refused(seconds):
    with pytest.raises(ReportError, match="must be finite and not negative"):
        result(seconds=seconds)


def test_an_unknown_family_is_refused():
    with pytest.raises(ReportError, match="of no known family"):
        result(check="luck.holds")


@pytest.mark.parametrize("again", ["pass", "fail"])
def test_a_check_that_stands_twice_is_refused(again):
    with pytest.raises(ReportError, match=r"graph\.replay\[decode\] stands twice"):
        report(result(), result(again))


def test_a_date_that_is_none_is_refused(tmp_path):
    path = written(tmp_path, lambda document: document["env"].update(date="yesterday"))
    with pytest.raises(ReportError, match="yesterday"):
        Report.load(path)


def test_a_saved_report_loads_as_it_was(tmp_path):
    saved = report(result(evidence={"error_over_budget": 0.4}, seconds=0.25), result("xfail", case="b", reason="#12"))
    saved.save(tmp_path / "new folder" / "r.json")
    assert Report.load(tmp_path / "new folder" / "r.json") == saved


def test_an_interrupted_save_keeps_the_old_file_and_leaves_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    of(**{"pass": 1}).save(path)
    before = path.read_bytes()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        of(fail=3).save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_loading_a_missing_file_says_so(tmp_path):
    with pytest.raises(ReportError, match=r"cannot read .*No such file"):
        Report.load(tmp_path / "absent.json")


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[" * 100_000], ids=["empty", "not text", "too deep"])
def test_loading_what_is_not_json_says_so(tmp_path, data):
    (tmp_path / "r.json").write_bytes(data)
    with pytest.raises(ReportError, match="not whole JSON"):
        Report.load(tmp_path / "r.json")


def test_loading_half_a_report_says_it_is_truncated(tmp_path):
    data = of(**{"pass": 1}).to_json()
    (tmp_path / "r.json").write_bytes(data[: len(data) // 2])
    with pytest.raises(ReportError, match="truncated"):
        Report.load(tmp_path / "r.json")


@pytest.mark.parametrize("schema", ["attn-report/1", "attn-report/4", "attn-report/6"])
def test_another_schema_is_refused_and_named_beside_the_one_needed(tmp_path, schema):
    path = written(tmp_path, lambda document: document.update(schema=schema))
    with pytest.raises(ReportError) as caught:
        Report.load(path)
    assert str(caught.value) == (
        f"{path} has schema '{schema}', a report has 'attn-report/5'. Run the checks again, or read it with the "
        "version that wrote it."
    )


def test_json_without_a_schema_is_refused(tmp_path):
    (tmp_path / "r.json").write_text("[1]")
    with pytest.raises(ReportError, match="schema None"):
        Report.load(tmp_path / "r.json")


def test_an_unknown_outcome_is_refused_with_its_place(tmp_path):
    path = written(tmp_path, lambda document: document["results"][1].update(outcome="passed"))
    with pytest.raises(ReportError, match=r"'passed'.*\$\.results.*pass, fail"):
        Report.load(path)


@pytest.mark.parametrize("value", ["0.5", "NaN", None, [1]])
def test_evidence_that_is_no_number_is_refused(tmp_path, value):
    path = written(tmp_path, lambda document: document["results"][0].update(evidence={"error": value}))
    with pytest.raises(ReportError, match=r"\$\.results"):
        Report.load(path)


def test_an_unknown_field_is_refused(tmp_path):
    path = written(tmp_path, lambda document: document["env"].update(colour="blue"))
    with pytest.raises(ReportError, match="colour"):
        Report.load(path)


@pytest.mark.parametrize("column", [-1, 1, "mode:decode"])
def test_a_column_that_is_not_in_the_table_is_refused(tmp_path, column):
    path = written(tmp_path, lambda document: document["results"][0].update(columns=[column]))
    with pytest.raises(ReportError, match="does not follow attn-report/5"):
        Report.load(path)
