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


def without(fields: dict[str, object], name: str) -> dict[str, object]:
    return {key: value for key, value in fields.items() if key != name}


def test_folder_is_searched_for_evidence(tmp_path):
    (tmp_path / "h200").mkdir()
    write(tmp_path / "h200", "check-k.json", report().document())
    write(tmp_path, "pair-agreement.json", msgspec.to_builtins(agreement()))
    write(tmp_path, "bench-backends.json", timings(row()))
    write(tmp_path, "soak-k.json", {"schema": "attn-soak/1"})
    sources = Sources.read([tmp_path / "h200" / "check-k.json", tmp_path])  # a file named twice is read once
    assert (len(sources.reports), len(sources.agreements), len(sources.timings)) == (1, 1, 1)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


WHOLE = json.dumps(report(result("pass")).document())
OTHER_SCHEMAS = ("attn-report/4", "attn-soak/1", "attn-bench/2", None, 7)
TEXTS = {
    "truncated": (WHOLE[:200], "not valid JSON.*truncated"),
    "NaN": (WHOLE.replace("0.0", "NaN", 1), "malformed"),
    "a huge integer": (WHOLE.replace("0.0", f"{10**400}", 1), "out of range"),
    "deep nesting": (WHOLE.replace('"c"', f'"c", "sources": {nested(100_000)}', 1), "recursion"),
    "an array as an object": (WHOLE.replace('"c"', f'"c", "sources": {nested(500)}', 1), r"\$\.sources"),
    "a key twice": (WHOLE.replace('"backend": "k"', '"backend": "k", "backend": "o"', 1), "'backend' occurs twice"),
    "half a character": (WHOLE.replace('"backend": "k"', r'"backend": "\ud800"', 1), "surrogate"),
    **{f"no evidence: {text}": (text, "has schema None") for text in ("[]", "[[]]", "null", "3")},
}
DOCUMENTS = {
    **{
        f"schema {schema}": (
            {**report().document(), "schema": schema},
            f"has schema {schema if isinstance(schema, str) else None!r}, but the matrix reads "
            "attn-report/6, attn-pair-agreement/5 and attn-bench/3.*the version that wrote it",
        )
        for schema in OTHER_SCHEMAS
    },
    "schemas": ({"schema": ["attn-bench/3"]}, "has schema None"),
    "fewer than no tokens kept": (timings(row(accepted=-1.0, per_user=5.0)), r">= 0.0.*\$\.rows\[0\]\.accepted"),
    "no number of requests": (timings(without(row(), "num_reqs")), r"num_reqs.*\$\.rows\[0\]"),
    "timings in tables": ({**timings(), "rows": {"tables": []}}, r"does not follow attn-bench/3: .*\$\.rows"),
    "results in tables": (
        {**report().document(), "results": {"tables": []}},
        r"does not follow attn-report/6: .*\$\.results",
    ),
    "an unknown field": ({**report().document(), "colour": 1}, "colour"),
    "an unknown field of a place": ({**report().document(), "env": {**ENV, "colour": 1}}, "colour"),
    "an unknown field of the sources": ({**report().document(), "sources": {"colour": 1}}, "colour"),
    "an unknown field of an agreement": (
        {**msgspec.to_builtins(agreement()), "colour": 1},
        "does not follow .*colour",
    ),
}


@pytest.mark.parametrize(("document", "words"), [*TEXTS.values(), *DOCUMENTS.values()], ids=[*TEXTS, *DOCUMENTS])
def test_invalid_evidence_is_rejected_by_name(tmp_path, document, words):
    assert document != WHOLE
    with pytest.raises(ReportError, match=rf"x\.json .*{words}") as caught:
        Sources.read([write(tmp_path, "x.json", document)])
    assert "again" in str(caught.value)


def test_pipe_is_rejected_and_folder_skipped(tmp_path):
    (tmp_path / "check-k.json").mkdir()
    assert files_below([tmp_path]) == []
    os.mkfifo(tmp_path / "check-p.json")
    with pytest.raises(ReportError, match=r"check-p\.json is not a regular file"):
        Sources.read([tmp_path])


def test_an_edited_report_is_refused(tmp_path):
    path = write(tmp_path, "bench-k.json", timings(row()))
    path.write_text(path.read_text().replace("[9.0,10.0,12.0]", "[0.9,1.0,1.2]"))
    with pytest.raises(ReportError, match=r"bench-k\.json was changed after it was written"):
        Sources.read([path])


def test_bench_case_may_have_its_own_columns(tmp_path):
    (found,) = Sources.read([write(tmp_path, "x.json", timings(row(peer_ratio=0.7)))]).timings
    assert (found.case, found.gpu_us, found.command) == (timing().case, timing().gpu_us, "bench")


def test_timing_has_the_title_that_its_report_gives_the_case(tmp_path):
    document = timings(row(case="round"), row(case="step")) | {"titles": {"round": "A whole draft round"}}
    found = Sources.read([write(tmp_path, "x.json", document)]).timings
    assert [timed.title for timed in found] == ["A whole draft round", "step"]


def test_timing_is_as_old_as_its_case_modules(tmp_path):
    devices = SourceRecord.of({"": ["builders.devices"]}).modules["builders"]["devices"]
    modules = {"builders": {"errors": "00000000", "devices": devices}}
    document = timings(row(case="old/round"), row(case="new"), row(case="older"))
    document["sources"] = {"modules": modules, "parts": {"old": [0], "new": [1]}}
    found = Sources.read([write(tmp_path, "x.json", document)]).timings
    assert [timed.changed for timed in found] == [("builders.errors",), (), ("builders.errors",)]


def test_part_with_unknown_modules_is_rejected(tmp_path):
    document = timings(row())
    document["sources"] = {"modules": {"builders": {"errors": "00000000"}}, "parts": {"throughput": [1]}}
    with pytest.raises(ReportError, match=r"parts must index the 1 modules, got 1"):
        Sources.read([write(tmp_path, "x.json", document)])


@pytest.mark.parametrize("schema", ["attn-report/6", "attn-matrix/5", "attn-bench/3", "attn-pair-agreement/5"])
def test_a_schema_requires_its_own_version(schema):
    found = msgspec.json.decode(schemas()[f"{schema.replace('/', '-')}.json"])
    top = found["$defs"][found["$ref"].rpartition("/")[2]]
    assert top["properties"]["schema"] == {"const": schema} and "schema" in top["required"]
    assert top["additionalProperties"] is False
