import json
import os
from pathlib import Path

import msgspec
import pytest

from scripts.schemas import schemas
from spec_decode.files import ReportError, report_bytes
from spec_decode.matrix import Sources
from spec_decode.matrix.sources import files_below
from spec_decode.source_digests import SourceRecord
from tests.spec_decode.matrix.evidence import ENV, agreement, report, result, timing


def write(folder: Path, name: str, document: object) -> Path:
    """A file of text, or a sealed report of a document."""
    path = folder / name
    path.write_bytes(report_bytes(document) if isinstance(document, dict) else str(document).encode())
    return path


def timings(*rows: dict[str, object]) -> dict[str, object]:
    """A report of the bench with these rows."""
    env = {**ENV, "copy_bytes_per_us": 4.0}
    return {"schema": "attn-bench/3", "env": env, "command": "bench", "rows": list(rows)}


def row(**columns: object) -> dict[str, object]:
    """A row of the bench, as a file holds it."""
    whole = msgspec.to_builtins(timing())
    return {**{name: whole[name] for name in ("case", "backend", "spec", "num_reqs", "context", "gpu_us")}, **columns}


def test_a_folder_stands_for_the_evidence_below_it(tmp_path):
    (tmp_path / "h200").mkdir()
    write(tmp_path / "h200", "check-k.json", report().document())
    write(tmp_path, "pair-agreement.json", msgspec.to_builtins(agreement()))
    write(tmp_path, "bench-backends.json", timings(row()))
    write(tmp_path, "soak-k.json", {"schema": "attn-soak/1"})
    sources = Sources.read([tmp_path])
    assert (len(sources.reports), len(sources.agreements), len(sources.timings)) == (1, 1, 1)


def test_a_file_named_twice_is_read_once(tmp_path):
    path = write(tmp_path, "check-k.json", report().document())
    assert len(Sources.read([path, tmp_path]).reports) == 1


@pytest.mark.parametrize("schema", ["attn-report/4", "attn-soak/1", "attn-bench/2", None, 7])
def test_another_schema_is_named_with_what_is_read_and_what_to_do(tmp_path, schema):
    path = write(tmp_path, "x.json", {**report().document(), "schema": schema})
    with pytest.raises(ReportError, match=r"attn-report/5, attn-pair-agreement/5 and attn-bench/3") as caught:
        Sources.read([path])
    told, named = str(caught.value), schema if isinstance(schema, str) else None
    assert f"x.json has schema {named!r}, the matrix reads" in told
    assert "Make it again" in told and "the version that wrote it" in told


@pytest.mark.parametrize("document", ["[]", "[[]]", "null", "3", {"schema": ["attn-bench/3"]}])
def test_json_that_is_no_evidence_is_refused(tmp_path, document):
    with pytest.raises(ReportError, match="has schema"):
        Sources.read([write(tmp_path, "x.json", document)])


def test_a_truncated_file_is_named(tmp_path):
    path = write(tmp_path, "cut.json", json.dumps(report(result("pass")).document())[:200])
    with pytest.raises(ReportError, match=r"cut\.json is not whole JSON.*truncated"):
        Sources.read([path])


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


BAD = {
    "NaN": ("0.0", "NaN", "malformed"),
    "a huge integer": ("0.0", f"{10**400}", "out of range"),
    "deep nesting": ('"c"', f'"c", "sources": {nested(100_000)}', "recursion"),
    "an array in the place of an object": ('"c"', f'"c", "sources": {nested(500)}', r"\$\.sources"),
    "a key twice": ('"backend": "k"', '"backend": "k", "backend": "other"', "'backend' stands twice"),
    "half a character": ('"backend": "k"', r'"backend": "\ud800"', "surrogate"),
}


@pytest.mark.parametrize("old, new, words", BAD.values(), ids=BAD)
def test_what_no_report_holds_is_refused_with_what_to_do(tmp_path, old, new, words):
    text = json.dumps(report(result("pass")).document())
    assert old in text
    with pytest.raises(ReportError, match=words) as caught:
        Sources.read([write(tmp_path, "x.json", text.replace(old, new, 1))])
    told = str(caught.value)
    assert "x.json" in told and told.endswith("again.")


def test_a_pipe_that_is_named_like_a_report_is_named_at_once(tmp_path):
    os.mkfifo(tmp_path / "check-k.json")
    with pytest.raises(ReportError, match=r"check-k\.json is no regular file"):
        Sources.read([tmp_path])


def test_a_folder_that_is_named_like_a_report_is_none(tmp_path):
    (tmp_path / "check-k.json").mkdir()
    assert files_below([tmp_path]) == []


def test_an_edited_report_is_refused(tmp_path):
    path = write(tmp_path, "bench-k.json", timings(row()))
    path.write_text(path.read_text().replace("[9.0,10.0,12.0]", "[0.9,1.0,1.2]"))
    with pytest.raises(ReportError, match=r"bench-k\.json was changed after it was written"):
        Sources.read([path])


def test_fewer_than_no_tokens_kept_are_refused_with_their_place(tmp_path):
    document = timings(row(accepted=-1.0, per_user=5.0))
    with pytest.raises(ReportError, match=r">= 0.0.*\$\.rows\[0\]\.accepted"):
        Sources.read([write(tmp_path, "x.json", document)])


@pytest.mark.parametrize("place", [(), ("env",), ("sources",)])
def test_an_unknown_field_of_a_report_is_refused_with_its_place(tmp_path, place):
    document = report(result("pass")).document()
    inner = document
    for step in place:
        inner = inner.setdefault(step, {})
    inner["colour"] = "blue"
    with pytest.raises(ReportError, match=r"colour"):
        Sources.read([write(tmp_path, "x.json", document)])


def test_an_unknown_field_of_an_agreement_is_refused(tmp_path):
    document = {**msgspec.to_builtins(agreement()), "colour": "blue"}
    with pytest.raises(ReportError, match=r"x\.json does not follow .*colour"):
        Sources.read([write(tmp_path, "x.json", document)])


def test_a_case_of_the_bench_may_have_columns_of_its_own(tmp_path):
    (found,) = Sources.read([write(tmp_path, "x.json", timings(row(peer_ratio=0.7)))]).timings
    assert (found.case, found.gpu_us, found.command) == (timing().case, timing().gpu_us, "bench")


def test_a_timing_without_its_number_of_requests_is_refused_with_its_place(tmp_path):
    without = row()
    del without["num_reqs"]
    with pytest.raises(ReportError, match=r"num_reqs.*\$\.rows\[0\]"):
        Sources.read([write(tmp_path, "x.json", timings(without))])


def test_a_timing_is_as_old_as_the_modules_behind_its_case(tmp_path):
    devices = SourceRecord.of({"": ["builders.devices"]}).modules["builders"]["devices"]
    modules = {"builders": {"errors": "00000000", "devices": devices}}
    document = timings(row(case="old/round"), row(case="new"), row(case="older"))
    document["sources"] = {"modules": modules, "parts": {"old": [0], "new": [1]}}
    found = Sources.read([write(tmp_path, "x.json", document)]).timings
    assert [timed.changed for timed in found] == [("builders.errors",), (), ("builders.errors",)]


@pytest.mark.parametrize("schema", ["attn-report/5", "attn-matrix/4", "attn-bench/3", "attn-pair-agreement/5"])
def test_a_schema_requires_its_own_version(schema):
    found = msgspec.json.decode(schemas()[f"{schema.replace('/', '-')}.json"])
    top = found["$defs"][found["$ref"].rpartition("/")[2]]
    assert top["properties"]["schema"] == {"const": schema} and "schema" in top["required"]
    assert top["additionalProperties"] is False
