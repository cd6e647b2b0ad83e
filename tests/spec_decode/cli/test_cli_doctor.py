import json

from attn_backends.findings import Finding, FindingStatus
from spec_decode.tools import doctor
from tests.mutants import mutant_named


def test_doctor_prints_every_topic_once(run):
    result = run("doctor", "--device", "cpu")
    assert result.exit_code == 0, result.output
    topics = [line for line in result.output.splitlines() if not line.startswith(" ")]
    assert topics == list(dict.fromkeys(topics)) and {"machine", "graphs", "FlashAttention-3", "backends"} <= {*topics}
    assert "device loop" in result.output


def test_doctor_json_contains_findings(run):
    found = json.loads(run("doctor", "--device", "cpu", "--json").stdout)
    assert {"topic", "subject", "status", "detail"} == set(found[0])
    assert {"machine", "graphs", "backends"} <= {entry["topic"] for entry in found}


def test_doctor_reports_metadata_validation_and_cost(run):
    result = run("doctor", "--device", "cpu", "--validate-metadata", "torch_reference", "--rounds", "4", "--every", "2")
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.output.splitlines() if "validations without drift" in line)
    assert "4 rounds (full_loop)" in line and "2 validations" in line and "ms each" in line


def test_doctor_exits_1_and_names_drift(run, plug_in):
    plug_in("stale", lambda: mutant_named("stale_seq_lens").backend)
    result = run("doctor", "--device", "cpu", "--validate-metadata", "stale", "--rounds", "4")
    assert result.exit_code == 1
    assert "round 1, step 0, group draft" in result.output and "field kv_end" in result.output


def test_doctor_rejects_unknown_backend_to_validate(refused):
    assert "nonesuch" in refused("doctor", "--device", "cpu", "--validate-metadata", "nonesuch")


def test_doctor_exits_1_for_failed_finding(run, monkeypatch):
    found = [Finding("graphs", "device loop", FindingStatus.FAILED, "RuntimeError: it ended at 1")]
    monkeypatch.setattr(doctor, "examine", lambda device: iter(found))
    result = run("doctor", "--device", "cpu")
    assert result.exit_code == 1 and "it ended at 1" in result.output
