"""Evidence is dated: what depends on a changed module is marked as older, and nothing else."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from spec_decode import source_digests
from spec_decode.files import ReportError, report_bytes
from spec_decode.matrix import build_matrix, to_html, to_json, to_table
from spec_decode.matrix.sources import files_below, read_documents, stale_reports
from spec_decode.source_digests import SourceRecord
from tests.spec_decode.matrix.evidence import ENV, report, result

KERNEL = "def kernel(x): return x + 1"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small package: one family of checks uses the kernel, another does not."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    files = {
        "__init__": "",
        "kernel": KERNEL,
        "numerics": "from tiny.kernel import kernel",
        "contract": "import math",
    }
    for name, source in files.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield folder
    forget()


def forget() -> None:
    for kept in (source_digests._uses, source_digests._module, source_digests._file):
        kept.cache_clear()


def tiny_report() -> Any:
    sources = SourceRecord.of({"numerics": ["tiny.numerics"], "contract": ["tiny.contract"]})
    results = (result("pass", "page:16"), result("pass", "contract:declared", check="contract.declares"))
    return msgspec.structs.replace(report(*results, claims={"page:16": True}), sources=sources)


def test_changed_kernel_marks_only_dependent_cells_older(project: Path) -> None:
    evidence = tiny_report()
    (project / "kernel.py").write_text(KERNEL.replace("+ 1", "+ 2"))
    forget()
    cells = build_matrix([evidence]).rows[0].cells
    assert cells["page:16"].evidence[0].changed == ("tiny.kernel",)
    assert cells["page:16"].text == "verified 1/1*" and cells["page:16"].status.value == "verified"
    assert cells["contract:declared"].evidence[0].changed == () and cells["contract:declared"].text == "verified 1/1"


def test_every_page_shows_older_source_files(project: Path) -> None:
    evidence = tiny_report()
    (project / "kernel.py").unlink()
    forget()
    matrix = build_matrix([evidence])
    page = to_html(matrix)
    assert "from older source (1 file changed)" in page and "<code>tiny.kernel</code>" in page
    assert b'"changed":["tiny.kernel"]' in to_json(matrix)
    stream = io.StringIO()
    Console(width=120, file=stream).print(to_table(matrix))
    assert "verified 1/1*" in stream.getvalue()


def test_stale_reports_are_named_with_changed_modules(project: Path, tmp_path: Path) -> None:
    sources = msgspec.to_builtins(SourceRecord.of({"": ["tiny.numerics"]}))
    for name, cuda in (("gpu", "13.0"), ("cpu", None)):
        document = {"schema": "attn-soak/4", "env": {**ENV, "cuda": cuda}, "sources": sources}
        (tmp_path / f"soak-{name}.json").write_bytes(report_bytes(document))
    (tmp_path / "fresh.json").write_bytes(report_bytes({"schema": "attn-soak/4", "env": ENV}))
    (tmp_path / "notes.json").write_text('{"sources": 3}')
    (project / "kernel.py").write_text("")
    forget()
    found = stale_reports(read_documents(files_below([tmp_path], ("*.json",))))
    assert {path.name: changed for path, changed in found.items()} == {
        "soak-gpu.json": ("tiny.kernel",),
        "soak-cpu.json": ("tiny.kernel",),
    }


def test_truncated_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    path.write_text('{"env": ')
    with pytest.raises(ReportError, match=r"soak\.json is not valid JSON"):
        stale_reports(read_documents([path]))
