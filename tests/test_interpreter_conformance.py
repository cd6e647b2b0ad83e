"""The kit on the interpreted Triton kernels, through the command that a user would type."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from builders.kernels.triton_runtime import HAVE_TRITON
from spec_decode.conformance import child
from spec_decode.conformance.report import Report
from spec_decode.testing.outcome import Outcome

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.skipif(not HAVE_TRITON, reason="needs the package triton")
@pytest.mark.parametrize(
    ("backend", "families"),
    [
        pytest.param("triton_paged", ("numerics",), marks=pytest.mark.long),
        ("triton_paged", ("contract", "builder", "refusal", "poison")),
        pytest.param("triton_state", ("state",), marks=pytest.mark.long),
    ],
)
def test_triton_kernels_pass_the_kit_in_interpreter(backend: str, families: tuple[str, ...], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    picked = [part for family in families for part in ("--family", family)]
    command = [sys.executable, "-m", "spec_decode", "check", backend, "--device", "cpu", *picked]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--json", str(report)], env=env, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert Report.load(report).counts[Outcome.PASS] >= 25


@pytest.mark.parametrize("interpreted", [False, True])
def test_isolated_process_interprets_like_command(interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr(child, "interpret_kernels_on", devices.append)
    monkeypatch.setattr(child, "running_threads", list)
    monkeypatch.setenv("TRITON_INTERPRET", str(int(interpreted)))
    with open(os.devnull, "wb") as nowhere:
        child.main("torch_reference", nowhere.fileno(), {"device": "cpu", "checks": ["contract.version_matches"]})
    assert devices == [torch.device("cpu")] * interpreted
