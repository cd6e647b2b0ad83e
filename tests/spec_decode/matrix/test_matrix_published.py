"""The published pages say what the committed reports say, and those cover every backend of the project."""

from pathlib import Path

import pytest

from attn_backends import registry
from spec_decode.matrix import Sources, build_matrix, to_html, to_markdown

ROOT = Path(__file__).parents[3]
RENEW = "renew with: attn-backends matrix reports --markdown docs/compatibility.md --html docs/compatibility.html"


@pytest.fixture(scope="module")
def published():
    sources = Sources.read([ROOT / "reports"])
    return build_matrix(sources.reports, sources.agreements, sources.timings)


@pytest.mark.parametrize(("name", "render"), [("md", to_markdown), ("html", to_html)])
def test_the_published_page_is_current(published, name, render):
    assert (ROOT / "docs" / f"compatibility.{name}").read_text(encoding="utf-8") == render(published), RENEW


def test_every_backend_of_the_project_was_checked_on_a_gpu(published):
    on_gpu = {row.backend for row in published.rows if published.runs[row.runs[0]].env.cuda}
    assert on_gpu == set(registry._BUILT_IN)


def test_no_evidence_is_without_its_provenance(published):
    for row in published.rows:
        for cell in row.cells:
            for evidence in cell.evidence:
                env = published.runs[evidence.run].env
                assert env.device == row.device and env.date and env.commit and env.torch
