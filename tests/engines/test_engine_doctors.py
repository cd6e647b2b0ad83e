"""What the doctor reports about an engine, without importing it."""

import importlib
import re
import sys
from importlib.metadata import EntryPoint, PackageNotFoundError

import pytest
import torch

from attn_backends.engines import plug_in

GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
BOTH = pytest.mark.parametrize("engine", GROUPS)


@pytest.fixture(autouse=True)
def all_plug_ins(monkeypatch):
    for engine in GROUPS:
        monkeypatch.delenv(f"{engine.upper()}_PLUGINS", raising=False)


def examine(monkeypatch, engine, release, value="attn_backends.engines.{}:register"):
    """The findings by subject, where this version is installed and this plug-in is declared."""

    def version(name):
        if release is None:
            raise PackageNotFoundError(name)
        return release

    declared = [EntryPoint("attn_backends", value.format(engine), GROUPS[engine])] if value else []
    monkeypatch.setattr(plug_in, "version", version)
    monkeypatch.setattr(plug_in, "entry_points", lambda group: declared if group == GROUPS[engine] else [])
    before, module = engine in sys.modules, f"attn_backends.engines.{engine}.doctor"
    answers = {finding.subject: finding for finding in importlib.import_module(module).examine()}
    assert before or engine not in sys.modules
    return answers


@BOTH
def test_missing_engine_finding_names_extra(monkeypatch, engine):
    (finding,) = examine(monkeypatch, engine, None).values()
    assert finding.status == "absent" and f"pip install '.[{engine}]' in a checkout" in finding.detail


@pytest.mark.parametrize(
    ("engine", "release", "supported"),
    [("vllm", "0.34.1", "vLLM 0.33, got 0.34.1"), ("sglang", "0.5.24", "SGLang 0.5.23, got 0.5.24")],
)
def test_another_release_is_refused_with_the_reason(monkeypatch, engine, release, supported):
    (finding,) = examine(monkeypatch, engine, release).values()
    assert finding.status == "refused" and f"are for {supported}" in finding.detail


SUPPORTED = {"vllm": "0.33.0", "sglang": "0.5.23"}


@BOTH
def test_supported_release_reports_every_backend(monkeypatch, engine):
    found = examine(monkeypatch, engine, SUPPORTED[engine])
    names = importlib.import_module(f"attn_backends.engines.{engine}").NAMES
    assert found[engine].detail == SUPPORTED[engine] and found["its plug-ins"].status == "ok"
    assert set(names) < set(found)
    triton = next(name for name in names if name.lower() == "attn_backends_triton_paged")
    assert found[triton].status == "ok"


def test_backend_missing_on_this_machine_is_refused(monkeypatch):
    assert examine(monkeypatch, "sglang", "0.5.23")["attn_backends_flash_attn3"].status == "refused"


def test_missing_package_is_the_reason(monkeypatch):
    from attn_backends.engines.vllm import doctor

    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    finding = examine(monkeypatch, "vllm", "0.33.0")["FLASHINFER_IN_GRAPH"]
    assert finding.status == "refused" and "pip install 'vllm==0.33.*'" in finding.detail


@BOTH
@pytest.mark.parametrize("value", ["", "other:register"])
def test_missing_entry_point_is_a_finding(monkeypatch, engine, value):
    finding = examine(monkeypatch, engine, SUPPORTED[engine], value)["its plug-ins"]
    assert finding.status == "refused" and f"{GROUPS[engine]}: reinstall attn-backends" in finding.detail


@BOTH
def test_variable_excluding_plug_in_is_a_finding(monkeypatch, engine):
    variable = f"{engine.upper()}_PLUGINS"
    monkeypatch.setenv(variable, "other,more")
    finding = examine(monkeypatch, engine, SUPPORTED[engine])["its plug-ins"]
    assert finding.status == "refused" and f"{variable}=other,more excludes attn_backends" in finding.detail


@pytest.mark.parametrize(
    ("engine", "value", "status"),
    [
        ("vllm", "other,attn_backends", "ok"),
        ("vllm", "other, attn_backends", "refused"),
        ("vllm", "", "refused"),
        ("sglang", "other,attn_backends", "ok"),
        ("sglang", "other, attn_backends ", "ok"),
        ("sglang", "", "ok"),
        ("sglang", ",", "refused"),
    ],
)
def test_plug_in_variable_is_parsed_like_engine(monkeypatch, engine, value, status):
    monkeypatch.setenv(f"{engine.upper()}_PLUGINS", value)
    assert examine(monkeypatch, engine, SUPPORTED[engine])["its plug-ins"].status == status


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("ATTN_BACKENDS_VALIDATE", "2", "must be 0 or 1, got '2'. Set"),
        ("ATTN_BACKENDS_DRAFT_HEAD", "8", "must be 16 or fp8, .* got '8'. Unset"),
        ("ATTN_BACKENDS_DRAFT_HEAD", "fp8:/no/ids.json", ": /no/ids.json cannot be read: .* Use a JSON list"),
    ],
)
def test_a_wrong_variable_is_a_finding(variable, value, reason, monkeypatch):
    monkeypatch.setenv(variable, value)
    finding = examine(monkeypatch, "vllm", "0.33.0")["its plug-ins"]
    assert finding.status == "refused" and re.search(f"{variable}:? ?{reason.removeprefix(': ')}", finding.detail)


@pytest.mark.parametrize(("capability", "served"), [(None, 2), ((9, 0), 2), ((8, 6), 1), ((7, 5), 0)])
def test_quantizations_are_findings(capability, served, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    findings = [examine(monkeypatch, "vllm", "0.33.0")[name] for name in ("attn_backends", "attn_backends_fp8")]
    assert [finding.status == "ok" for finding in findings] == [served > 0, served > 1]
    for finding in findings:
        assert ("--quantization" if finding.status == "ok" else f"{capability}; use one of") in finding.detail
