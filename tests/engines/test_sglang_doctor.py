"""What the doctor says of SGLang, without importing it."""

import sys
from importlib.metadata import EntryPoint, PackageNotFoundError

from engines import findings
from engines.sglang import NAMES, doctor


def examine(monkeypatch, found, points=(("attn_backends", "engines.sglang:register"),)):
    """The findings by subject, where this version is installed and these plug-ins are declared."""

    def version(name):
        if found is None:
            raise PackageNotFoundError(name)
        return found

    declared = [EntryPoint(name, value, "sglang.srt.plugins") for name, value in points]
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    monkeypatch.setattr(findings, "version", version)
    monkeypatch.setattr(findings, "entry_points", lambda group: declared)
    before = "sglang" in sys.modules
    answers = {finding.subject: finding for finding in doctor.examine()}
    assert before or "sglang" not in sys.modules
    return answers


def test_without_sglang_the_extra_that_brings_it_is_named(monkeypatch):
    (finding,) = examine(monkeypatch, None).values()
    assert finding.status == "absent" and "pip install 'attn-backends[sglang]'" in finding.detail


def test_another_release_is_refused_with_the_reason(monkeypatch):
    (finding,) = examine(monkeypatch, "0.5.24").values()
    assert finding.status == "refused" and "are for SGLang 0.5.23, got 0.5.24" in finding.detail


def test_the_supported_release_has_an_answer_for_every_backend(monkeypatch):
    found = examine(monkeypatch, "0.5.23")
    assert found["sglang"].detail == "0.5.23" and found["its plug-ins"].status == "ok"
    assert set(NAMES) < set(found) and found["attn_backends_triton_paged"].status == "ok"
    assert found["attn_backends_flash_attn3"].status == "refused"


def test_an_entry_point_that_is_not_there_is_a_finding(monkeypatch):
    finding = examine(monkeypatch, "0.5.23", points=[])["its plug-ins"]
    assert finding.status == "refused" and "sglang.srt.plugins: install attn-backends again" in finding.detail
