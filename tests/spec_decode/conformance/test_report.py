import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from builders import AttentionKind, AttentionSpec
from spec_decode.conformance.case_records import BatchRecord, SpecRecord
from spec_decode.conformance.report import Claim, ConformanceFailure, Report, Result
from spec_decode.files import ReportError, parse_json, report_bytes
from spec_decode.source_digests import SourceRecord
from spec_decode.testing.batches import VERIFY, Batch
from tests.spec_decode.matrix.evidence import report, result

WINDOWED = SpecRecord.of(
    AttentionSpec(num_q_heads=8, num_kv_heads=1, head_dim=64, page_size=16, sliding_window=40, dtype=torch.float16)
)
RAGGED_ROWS = BatchRecord.of(Batch((3, 1, 20), (3, 64, 20), 4))
BAD, OTHERS = ("fail", "error", "xpass", "not_run"), ("unsupported", "xfail", "preview", "unavailable")


def of(*outcomes: str) -> Report:
    return report(*map(result, outcomes))


@pytest.mark.parametrize(
    ("outcomes", "ok"),
    [
        ((), False),
        (("unsupported", "unavailable", "preview"), False),
        (("pass",), True),
        (("pass", *OTHERS, *OTHERS), True),
        *((("pass", "pass", bad), False) for bad in BAD),
    ],
)
def test_report_needs_a_pass_and_no_failure(outcomes: tuple[str, ...], ok: bool) -> None:
    found = of(*outcomes)
    assert found.ok is ok and [result.outcome for result in found.failures] == [
        each for each in outcomes if each in BAD
    ]
    if ok:
        found.raise_if_failed()


TELLING = ("builder", "numerics", "state")


@pytest.mark.parametrize("family", TELLING)
def test_passes_without_a_telling_family_are_not_ok(family: str) -> None:
    refused = [result("unsupported", check=f"{check}.holds") for check in TELLING]
    declared = result("pass", check="contract.holds")
    found = report(declared, *refused)
    assert not found.ok and report(declared).ok
    with pytest.raises(ConformanceFailure, match="no builder, numerics or state check passed, so nothing is proven"):
        found.raise_if_failed()
    assert report(declared, *refused, result("pass", check=f"{family}.holds")).ok


def test_counts_name_every_outcome_in_order() -> None:
    counts = of("pass", "pass", "error").counts
    assert " ".join(counts) == "pass fail xfail xpass unsupported unavailable error preview not_run"
    assert counts["pass"] == 2 and counts["error"] == 1 and sum(counts.values()) == 3


def test_summary_is_one_line_with_counts_and_device() -> None:
    assert of(*["pass"] * 205, *["xfail"] * 3, *["unsupported"] * 14, *["unavailable"] * 9).summary() == (
        "k: 231 checks = 205 pass, 3 xfail, 14 unsupported, 9 unavailable, 0 not_run (H200, torch 2.13.0)"
    )
    assert "1 checks = 0 pass, 1 fail, 0 not_run" in of("fail").summary()


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ([], ["no check passed"]),
        (
            [result("pass"), result("fail", check="graph.replay", case="verify", reason="slot 64 was written twice")],
            [
                "fail: graph.replay[verify]: slot 64 was written twice",
                "attn-backends check k --device cuda --only 'graph.replay*verify*'",
            ],
        ),
        ([result("fail")] * 30, ["and 20 more"]),
    ],
)
def test_failure_message_has_checks_reasons_and_repro(results: list[Result], words: list[str]) -> None:
    with pytest.raises(ConformanceFailure) as caught:
        report(*results).raise_if_failed()
    assert all(part in str(caught.value) for part in words)


def test_json_has_exactly_the_documented_fields() -> None:
    results = (
        result("pass", "page:16", evidence={"error": 0.5}, spec=WINDOWED, batch=RAGGED_ROWS),
        msgspec.structs.replace(result("fail", case="prefill", reason="wrong"), tags=()),
    )
    full = report(*results, package="p 1", engine="e 2", contract="1.0", claims={"page:16": Claim(claimed=True)})
    full = msgspec.structs.replace(full, sources=SourceRecord.of({"numerics": ["builders.errors"]}))
    data = full.to_json()
    document = parse_json(data, "full")
    assert data.count(b"\n") == 1
    assert " ".join(document) == (
        "schema backend version package engine contract env command sources claims columns specs batches results digest"
    )
    assert " ".join(document["env"]) == (
        "device torch triton python commit dirty date driver cuda platform stated packages"
    )
    assert document["schema"] == "attn-report/6" and list(document["sources"]) == ["modules", "parts"]
    assert document["columns"] == ["page:16"]
    assert document["specs"] == [msgspec.to_builtins(WINDOWED)] and document["batches"] == [
        {"rows": 4, "num_reqs": 3, "query_lens": [1, 20], "seq_lens": [3, 64], "padding_tokens": 0, "trees": False}
    ]
    of_both = {"check": "numerics.right", "seconds": 0.0}
    assert document["results"] == [
        {
            **of_both,
            "case": "decode",
            "outcome": "pass",
            "evidence": {"error": 0.5},
            "columns": [0],
            "spec": 0,
            "batch": 0,
        },
        {**of_both, "case": "prefill", "outcome": "fail", "reason": "wrong", "columns": []},
    ]


def test_json_does_not_depend_on_evidence_order() -> None:
    first, second = ({"a": 1.0, "b": 2.0}, {"b": 2.0, "a": 1.0})
    assert report(result("pass", evidence=first)).to_json() == report(result("pass", evidence=second)).to_json()


def test_saved_report_loads_unchanged(tmp_path: Path) -> None:
    saved = report(result("pass", evidence={"error_over_budget": 0.4}, seconds=0.25), result("xfail", reason="#12"))
    saved.save(tmp_path / "new folder" / "r.json")
    assert Report.load(tmp_path / "new folder" / "r.json") == saved


def test_specs_and_batches_are_written_once(tmp_path: Path) -> None:
    with_spec = [result("pass", spec=WINDOWED, batch=RAGGED_ROWS) for _ in range(3)]
    saved = report(*with_spec, result("fail"), result("unsupported", spec=SpecRecord.of(LATENT)))
    assert [len(saved.document()[table]) for table in ("specs", "batches")] == [2, 1]
    saved.save(tmp_path / "r.json")
    assert Report.load(tmp_path / "r.json") == saved


LATENT = AttentionSpec(
    num_q_heads=16,
    num_kv_heads=1,
    head_dim=512,
    value_dim=448,
    page_size=64,
    kv_dtype=torch.float8_e4m3fn,
    sliding_window=128,
    scale=0.3,
    soft_cap=2.0,
    sinks=True,
    kind=AttentionKind.MLA,
    batch_invariant=True,
    tree=True,
)


@pytest.mark.parametrize("spec", [LATENT, WINDOWED.spec(), replace(WINDOWED.spec(), causal=False)])
def test_spec_record_round_trips(spec: AttentionSpec) -> None:
    assert SpecRecord.of(spec).spec() == spec


def test_batch_record_separates_padding_rows_and_tokens() -> None:
    padded = BatchRecord.of(VERIFY)
    assert (padded.rows, padded.num_reqs, padded.query_lens, padded.seq_lens) == (4, 3, (5, 5), (5, 150))
    assert (padded.padding_tokens, RAGGED_ROWS.padding_tokens) == (5, 0)


def test_older_schema_loads_without_specs(tmp_path: Path) -> None:
    found = of("pass")
    old = {**found.document(), "schema": "attn-report/5"}
    (tmp_path / "r.json").write_bytes(report_bytes(old))
    assert Report.load(tmp_path / "r.json") == found and found.results[0].spec is None


def test_non_finite_evidence_round_trips_by_name(tmp_path: Path) -> None:
    found = report(result("pass", evidence={"a": math.nan, "b": math.inf, "c": -math.inf}))
    assert found.document()["results"][0]["evidence"] == {"a": "nan", "b": "inf", "c": "-inf"}
    found.save(tmp_path / "r.json")
    evidence = Report.load(tmp_path / "r.json").results[0].evidence
    assert math.isnan(evidence["a"]) and (evidence["b"], evidence["c"]) == (math.inf, -math.inf)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *(
            (lambda s=s: result("pass", seconds=s), "must be finite and not negative")
            for s in (math.nan, math.inf, -0.5)
        ),
        (lambda: result("pass", check="luck.holds"), "an unknown family"),
        *(
            (
                lambda again=again: msgspec.structs.replace(report(), results=(result("pass"), result(again))),
                r"has numerics\.right\[decode\] twice",
            )
            for again in ("pass", "fail")
        ),
    ],
)
def test_invalid_result_is_rejected_at_creation(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ReportError, match=words):
        make()


def test_interrupted_save_keeps_old_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    of("pass").save(path)
    before = path.read_bytes()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        of("fail", "fail").save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("make", "words"),
    [(os.mkfifo, "is not a regular file"), (os.mkdir, "is not a regular file"), (str, r"cannot read .*No such file")],
    ids=["a pipe", "a folder", "nothing"],
)
def test_irregular_file_is_rejected(tmp_path: Path, make: Callable[[Path], object], words: str) -> None:
    make(tmp_path / "r.json")
    with pytest.raises(ReportError, match=words):
        Report.load(tmp_path / "r.json")


BYTES = {
    "empty": (lambda data: b"", "not valid JSON"),
    "not text": (lambda data: b"\xff\xfe", "not valid JSON"),
    "too deep": (lambda data: b"[" * 100_000, "not valid JSON"),
    "half": (lambda data: data[: len(data) // 2], "truncated"),
    "edited": (
        lambda data: data.replace(b'"fail"', b'"pass"'),
        "was changed after it was written: its digest does not",
    ),
    "no report": (lambda data: b"[1]", "schema None"),
}


@pytest.mark.parametrize(("change", "words"), BYTES.values(), ids=BYTES)
def test_invalid_report_bytes_are_rejected_by_name(
    tmp_path: Path, change: Callable[[bytes], bytes], words: str
) -> None:
    (tmp_path / "r.json").write_bytes(change(of("fail").to_json()))
    with pytest.raises(ReportError, match=rf"r\.json .*{words}"):
        Report.load(tmp_path / "r.json")


ANOTHER_SCHEMA = (
    "has schema '{}', not 'attn-report/6'. Run the checks again, or read it with the version that wrote it."
)
CHANGES: list[tuple[Callable[[Any], object], str]] = [
    (lambda document: document["env"].update(date="yesterday"), "yesterday"),
    (lambda document: document["env"].update(colour="blue"), "colour"),
    (lambda document: document["results"][0].update(spec=0), "does not follow attn-report/6"),
    (lambda document: document["results"][0].update(batch=-1), r"\$\.results"),
    (lambda document: document.update(specs=[{**msgspec.to_builtins(WINDOWED), "num_kv_heads": 3}]), "multiple of"),
    (lambda document: document.update(specs=[{**msgspec.to_builtins(WINDOWED), "dtype": "Tensor"}]), "not a dtype"),
    (lambda document: document["results"][1].update(outcome="passed"), r"'passed'.*\$\.results.*pass, fail"),
]
CHANGES += [
    (lambda document, schema=schema: document.update(schema=schema), ANOTHER_SCHEMA.format(schema))
    for schema in ("attn-report/1", "attn-report/4", "attn-report/7")
]
CHANGES += [
    (lambda document, value=value: document["results"][0].update(evidence={"error": value}), r"\$\.results")
    for value in ("0.5", "NaN", None, [1])
]
CHANGES += [
    (lambda document, at=at: document["results"][0].update(columns=[at]), "does not follow attn-report/6")
    for at in (-1, 1, "mode:decode")
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_invalid_report_document_is_rejected(tmp_path: Path, change: Callable[[Any], object], words: str) -> None:
    document = of("pass", "pass").document()
    change(document)
    (tmp_path / "r.json").write_bytes(report_bytes(document))
    with pytest.raises(ReportError, match=words):
        Report.load(tmp_path / "r.json")
