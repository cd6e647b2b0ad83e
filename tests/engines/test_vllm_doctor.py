"""What the doctor says of vLLM, without importing it."""

import sys
from importlib.metadata import EntryPoint, PackageNotFoundError

import pytest

from engines import findings
from engines.vllm import NAMES, doctor


def examine(monkeypatch, found, points=(("attn_backends", "engines.vllm:register"),)):
    """The findings by subject, where this version is installed and these plug-ins are declared."""

    def version(name):
        if found is None:
            raise PackageNotFoundError(name)
        return found

    declared = [EntryPoint(name, value, "vllm.general_plugins") for name, value in points]
    monkeypatch.setattr(findings, "version", version)
    monkeypatch.setattr(findings, "entry_points", lambda group: declared)
    before = "vllm" in sys.modules
    answers = {finding.subject: finding for finding in doctor.examine()}
    assert before or "vllm" not in sys.modules
    return answers


@pytest.fixture(autouse=True)
def all_plug_ins(monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


def test_without_vllm_the_extra_that_brings_it_is_named(monkeypatch):
    (finding,) = examine(monkeypatch, None).values()
    assert finding.status == "absent" and "pip install 'attn-backends[vllm]'" in finding.detail


def test_another_minor_is_refused_with_the_reason(monkeypatch):
    (finding,) = examine(monkeypatch, "0.34.1").values()
    assert finding.status == "refused" and "are for vLLM 0.33, got 0.34.1" in finding.detail


def test_the_supported_minor_has_an_answer_for_every_backend(monkeypatch):
    found = examine(monkeypatch, "0.33.0")
    assert found["vllm"].detail == "0.33.0" and found["its plug-ins"].status == "ok"
    assert set(NAMES) < set(found)
    assert found["ATTN_BACKENDS_TRITON_PAGED"].status == "ok"


def test_a_package_that_is_missing_is_the_reason(monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    finding = examine(monkeypatch, "0.33.0")["FLASHINFER_IN_GRAPH"]
    assert finding.status == "refused" and "pip install 'vllm==0.33.*' brings it" in finding.detail


def test_an_entry_point_that_is_not_there_is_a_finding(monkeypatch):
    finding = examine(monkeypatch, "0.33.0", points=[("other", "other:register")])["its plug-ins"]
    assert finding.status == "refused" and "install attn-backends again" in finding.detail


def test_a_variable_that_leaves_the_plug_in_out_is_a_finding(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other,more")
    finding = examine(monkeypatch, "0.33.0")["its plug-ins"]
    assert finding.status == "refused" and "VLLM_PLUGINS=other,more leaves attn_backends out" in finding.detail
