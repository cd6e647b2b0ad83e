"""The committed reports load, and cover every backend of the project."""

from pathlib import Path

import pytest

from attn_backends import registry
from spec_decode.matrix import Sources, build_matrix

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def sources():
    return Sources.read([ROOT / "reports"])


@pytest.fixture(scope="module")
def published(sources):
    return build_matrix(sources.reports, sources.agreements, sources.timings)


def test_every_backend_ran_on_gpu_or_is_marked(published):
    on_gpu = {row.backend for row in published.rows if published.runs[row.runs[0]].env.cuda}
    page = (ROOT / "docs/backends.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if "**Not yet run on a GPU**" in line]
    not_run = {line.partition("`")[2].partition("`")[0] for line in lines}
    assert on_gpu | not_run == set(registry._BUILT_IN) and not on_gpu & not_run


def test_no_evidence_is_without_its_provenance(published):
    for row in published.rows:
        for cell in row.cells.values():
            for evidence in cell.evidence:
                env = published.runs[evidence.run].env
                assert env.device == row.device and env.date and env.commit and env.torch
