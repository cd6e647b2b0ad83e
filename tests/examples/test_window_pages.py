"""The example package as its own CI would run it; the page's tests cover the other checks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spec_decode.conformance.report import Report
from spec_decode.testing.outcome import Outcome
from tests.examples.stranger import Stranger

EXAMPLE = Path(__file__).parents[2] / "examples" / "window_pages"
_NARROWED = {
    "pytest -q": "pytest -q -k 'contract or refusal or poison or soft_cap or drawn_attention'",
    "attn-backends check window_pages --strict-claims --json report.json": (
        "attn-backends check window_pages --json report.json --only '*soft_cap*' --only '*sinks*' --only '*[[]base-*'"
    ),
}
"""Commands of the stranger's CI, and what this one runs of them."""


def ci_commands() -> list[str]:
    return re.findall(r"^ +- run: (.*)$", (EXAMPLE / ".github/workflows/ci.yml").read_text(), re.MULTILINE)


EXITS = """
import ctypes
from attn_backends import register
from attn_backends.torch_reference import TorchReference
from spec_decode.conformance import parametrize_with_checks

@register
class Exits(TorchReference):
    name = "exits"

    def forward(self, *inputs, **options):
        ctypes.CDLL(None)._exit(0)

@parametrize_with_checks("exits")
def test_conformance(check):
    check()
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [EXITS, "import ctypes; ctypes.CDLL(None)._exit(0)"], ids=["in a check", "at import"])
def test_native_exit_with_status_0_fails_package_tests(code: str, tmp_path: Path) -> None:
    shutil.copy(EXAMPLE / "pyproject.toml", tmp_path)
    (tmp_path / "test_conformance.py").write_text(code)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    ended = subprocess.run(
        # A second worker, in the place of the one that ended, would import everything again.
        [sys.executable, "-m", "pytest", "-q", "--max-worker-restart=0", "-k", "base-single] or not conformance"],
        cwd=tmp_path,
        env={**env, "PYTHONPATH": str(EXAMPLE.parents[1])},
        stdout=subprocess.PIPE,
        text=True,
    )
    message = "crashed while running 'test_conformance.py::test_conformance[" if code is EXITS else "no tests ran"
    assert ended.returncode != 0 and message in ended.stdout


def test_ci_contains_the_narrowed_commands() -> None:
    assert set(_NARROWED) < set(ci_commands())


@pytest.mark.slow
def test_package_ci_passes_and_reports_known_failures(tmp_path: Path) -> None:
    checkout = tmp_path / "window_pages"
    shutil.copytree(EXAMPLE, checkout)
    stranger = Stranger.arrive(tmp_path / "environment")
    for command in ci_commands():
        stranger.must(_NARROWED.get(command, command), checkout)
    report = Report.load(checkout / "report.json")
    known = [result for result in report.results if result.outcome is Outcome.XFAIL]

    assert report.ok and report.version == "0.1.0" and report.counts[Outcome.PASS] > 50
    soft_caps = {f"soft_cap-{batch}" for batch in ("decode", "single", "verify", "ragged")}
    assert {result.case for result in known} == {"soft_cap_4099", *soft_caps}
    assert all("window-pages/issues/1: the soft cap" in result.reason for result in known)
    assert "has no sinks" in {result.reason for result in report.results if result.outcome is Outcome.UNSUPPORTED}
