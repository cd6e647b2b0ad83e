"""The writer of reports; a GPU test is skipped without a device, and fails if its report was requested."""

import pytest
import torch

from spec_decode.files import read_json, require_unedited

pytest_plugins = "pytester"
TESTS = """
import pytest

@pytest.mark.gpu
def test_gpu(write_report): pass

def test_cpu(write_report, backends):
    write_report("attn-example/1", backends=backends, rows=[])
    write_report("attn-example/1", backends=backends, rows=[1])
"""


@pytest.fixture
def run(pytester: pytest.Pytester):
    """Runs these two tests and returns what pytest said, and the report if there is one."""
    pytester.makeconftest("from tests.gpu.conftest import *")
    pytester.makepyfile(test_example=TESTS)
    path = pytester.path / "report.json"

    def run(*options: str) -> tuple[str, dict]:
        done = pytester.runpytest_inprocess(
            "-p", "spec_decode.testing.pytest_plugin", "-rs", "--json", str(path), *options
        )
        return done.stdout.str(), read_json(path) if path.exists() else {}

    return run


def test_last_report_is_sealed_with_its_command(run):
    output, report = run("-k", "cpu", "--attn-backend", "triton_paged")
    assert " 1 passed" in output and (report["schema"], report["rows"]) == ("attn-example/1", [1])
    assert report["command"].startswith("python -m pytest") and report["env"]["torch"] == torch.__version__
    assert report["command"].endswith("-k cpu --attn-backend triton_paged --json FILE")
    assert "triton_paged" in report["sources"]["modules"]["attn_backends"]
    require_unedited(report, "report.json")


def test_report_of_several_tests_is_rejected(run):
    output, report = run()
    assert "--json takes the report of one test, 2 were collected" in output and not report


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a CUDA device")
def test_requested_gpu_evidence_is_not_skipped(run):
    output, report = run("-m", "gpu")
    assert " 1 error" in output and "needs a CUDA device, torch finds none" in output and not report
