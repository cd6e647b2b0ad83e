import json
from pathlib import Path

import msgspec
import pytest

from scripts.schemas import schemas
from spec_decode.conformance.report import ReportError
from spec_decode.matrix import Sources
from tests.spec_decode.matrix.evidence import agreement, report, result, timing

ROOT = Path(__file__).parents[3]


def write(folder: Path, name: str, document: object) -> Path:
    path = folder / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_a_folder_stands_for_the_evidence_below_it(tmp_path):
    (tmp_path / "h200").mkdir()
    write(tmp_path / "h200", "check-k.json", report().document())
    write(tmp_path, "pair-agreement.json", msgspec.to_builtins(agreement()))
    write(tmp_path, "bench-backends.json", [msgspec.to_builtins(timing())])
    write(tmp_path, "soak-k.json", {"schema": "attn-soak/1"})
    sources = Sources.read([tmp_path])
    assert (len(sources.reports), len(sources.agreements), len(sources.timings)) == (1, 1, 1)


def test_a_file_named_twice_is_read_once(tmp_path):
    path = write(tmp_path, "check-k.json", report().document())
    assert len(Sources.read([path, tmp_path]).reports) == 1


@pytest.mark.parametrize("schema", ["attn-report/1", "attn-report/2", "attn-soak/1", "attn-bench/1", None, 7])
def test_another_schema_is_named_with_what_is_read_and_what_to_do(tmp_path, schema):
    path = write(tmp_path, "x.json", {**report().document(), "schema": schema})
    with pytest.raises(ReportError, match=r"attn-report/3, attn-pair-agreement/3 and attn-bench/2") as caught:
        Sources.read([path])
    told, named = str(caught.value), schema if isinstance(schema, str) else None
    assert f"x.json has {named!r}; nothing was shown" in told
    assert "Make the report again" in told and "the version that wrote it" in told


@pytest.mark.parametrize("document", [[], [[]], "null", "3", [{"schema": ["attn-bench/2"]}]])
def test_json_that_is_no_evidence_is_refused(tmp_path, document):
    with pytest.raises(ReportError, match="nothing was shown"):
        Sources.read([write(tmp_path, "x.json", document)])


def test_a_truncated_file_is_named(tmp_path):
    path = write(tmp_path, "cut.json", json.dumps(report(result("pass")).document())[:200])
    with pytest.raises(ReportError, match=r"whole JSON, .*cut\.json.*truncated"):
        Sources.read([path])


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


BAD = {
    "NaN": ('"seconds": 0.0', '"seconds": NaN', "malformed"),
    "a huge integer": ('"seconds": 0.0', f'"seconds": {10**400}', "out of range"),
    "deep nesting": ('"claims": {}', f'"claims": {nested(100_000)}', "recursion"),
    "an array in the place of an object": ('"claims": {}', f'"claims": {nested(500)}', r"\$\.claims"),
    "a key twice": ('"backend": "k"', '"backend": "k", "backend": "other"', "'backend' stands twice"),
    "half a character": ('"backend": "k"', r'"backend": "\ud800"', "surrogate"),
}


@pytest.mark.parametrize("old, new, words", BAD.values(), ids=BAD)
def test_what_no_report_holds_is_refused_in_four_parts(tmp_path, old, new, words):
    text = json.dumps(report(result("pass")).document())
    assert old in text
    with pytest.raises(ReportError, match=words) as caught:
        Sources.read([write(tmp_path, "x.json", text.replace(old, new, 1))])
    told = str(caught.value)
    assert "must" in told and "x.json" in told and "it was not loaded" in told and told.endswith("again.")


def test_a_folder_where_a_report_is_due_is_named(tmp_path):
    (tmp_path / "check-k.json").mkdir()
    with pytest.raises(ReportError, match=r"readable file, .*check-k\.json is not: Is a directory"):
        Sources.read([tmp_path])


def test_rows_of_another_schema_among_timings_are_refused(tmp_path):
    rows = [msgspec.to_builtins(timing()), {**msgspec.to_builtins(timing()), "schema": "attn-bench/9"}]
    with pytest.raises(ReportError, match="has 'attn-bench/9'"):
        Sources.read([write(tmp_path, "x.json", rows)])


def test_fewer_than_no_tokens_kept_are_refused_with_their_place(tmp_path):
    row = {**msgspec.to_builtins(timing()), "accepted": -1.0, "per_user": 5.0}
    with pytest.raises(ReportError, match=r">= 0.0.*\$\[0\]\.accepted"):
        Sources.read([write(tmp_path, "x.json", [row])])


@pytest.mark.parametrize("place", [(), ("env",), ("results", 0)])
def test_an_unknown_field_of_a_report_is_refused_with_its_place(tmp_path, place):
    document = report(result("pass")).document()
    inner = document
    for step in place:
        inner = inner[step]
    inner["colour"] = "blue"
    with pytest.raises(ReportError, match=r"colour"):
        Sources.read([write(tmp_path, "x.json", document)])


def test_an_unknown_field_of_an_agreement_is_refused(tmp_path):
    document = {**msgspec.to_builtins(agreement()), "colour": "blue"}
    with pytest.raises(ReportError, match=r"x\.json does not: .*colour"):
        Sources.read([write(tmp_path, "x.json", document)])


def test_a_case_of_the_bench_may_have_columns_of_its_own(tmp_path):
    row = {**msgspec.to_builtins(timing()), "peer_ratio": 0.7}
    assert Sources.read([write(tmp_path, "x.json", [row])]).timings == [timing()]


def test_a_timing_without_its_number_of_requests_is_refused_with_its_place(tmp_path):
    row = msgspec.to_builtins(timing())
    del row["num_reqs"]
    with pytest.raises(ReportError, match=r"num_reqs.*\$\[0\]"):
        Sources.read([write(tmp_path, "x.json", [row])])


def test_the_committed_schemas_are_those_of_the_code():
    folder = ROOT / "schemas"
    committed = {path.name: path.read_bytes() for path in folder.glob("*.json")}
    assert committed == schemas(), "renew with: python scripts/schemas.py schemas"


def test_a_schema_requires_its_own_version():
    schema = msgspec.json.decode(schemas()["attn-report-3.json"])
    top = schema["$defs"]["Report"]
    assert top["properties"]["schema"] == {"const": "attn-report/3"} and "schema" in top["required"]
    assert top["additionalProperties"] is False
