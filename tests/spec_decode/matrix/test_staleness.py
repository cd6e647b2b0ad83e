"""A report of a GPU is out of date as soon as the source that it covers is another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from spec_decode.matrix.sources import files_below, read_documents
from spec_decode.matrix.staleness import out_of_date
from spec_decode.source_digests import CHECKS, source_digests
from tests.spec_decode.matrix.evidence import ENV

NOW = source_digests(CHECKS)


def write(path: Path, sources: dict[str, str] | None, *, cuda: str | None = "13.0", rows: int = 0) -> Path:
    document: dict[str, Any] = {"schema": "attn-soak/2", "env": {**ENV, "cuda": cuda}}
    document |= {} if sources is None else {"sources": sources}
    path.write_bytes(msgspec.json.encode([document] * rows if rows else document))
    return path


def stale_below(path: Path) -> dict[Path, str]:
    return out_of_date(read_documents(files_below([path], ("*.json",))))


def test_a_report_of_the_source_as_it_is_is_current(tmp_path: Path) -> None:
    write(tmp_path / "soak.json", NOW)
    assert stale_below(tmp_path) == {}


@pytest.mark.parametrize("rows", [0, 2])
def test_a_report_names_the_packages_that_changed(tmp_path: Path, rows: int) -> None:
    path = write(tmp_path / "soak.json", {**NOW, "builders": "0" * 16, "spec_decode.drafter": "1" * 16}, rows=rows)
    assert stale_below(tmp_path) == {path: "builders, spec_decode.drafter changed since"}


@pytest.mark.parametrize("sources", [None, {}])
def test_a_report_that_does_not_say_what_it_covers_is_out_of_date(tmp_path: Path, sources: Any) -> None:
    path = write(tmp_path / "soak.json", sources)
    assert stale_below(path) == {path: "it does not say what source it covers"}


def test_reports_of_a_cpu_are_made_again_by_anyone(tmp_path: Path) -> None:
    write(tmp_path / "soak.json", None, cuda=None)
    assert stale_below(tmp_path) == {}


def test_json_that_is_no_report_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text('{"env": "none"}')
    assert stale_below(tmp_path) == {}


def test_a_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    path.write_text('{"env": ')
    assert "whole JSON" in stale_below(tmp_path)[path]
