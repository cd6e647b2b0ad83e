"""Plug-ins with one fault each, installed together: each is named, and none loses another's results.

Those that end or block their process are checked as the matrix does it, each in its own process. What a plug-in can do
to the kit is in test_faults_in_the_kit.py, how plug-ins are tried before they are loaded in test_plug_ins.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from click.testing import CliRunner, Result

from attn_backends import BrokenBackend, get, names, registry
from attn_backends.torch_reference import TorchReference
from spec_decode.cli.main import main
from spec_decode.cli.matrix_run import MatrixRun
from spec_decode.conformance import check_backend, subprocess_runner
from spec_decode.conformance.report import Report
from spec_decode.conformance.subprocess_runner import TimeLimits
from spec_decode.environment import environment
from spec_decode.matrix import Matrix, Status, build_matrix, to_html
from spec_decode.testing.outcome import Outcome
from spec_decode.tools import plug_ins
from tests.factories import install_plug_in
from tests.forked import fork_isolated
from tests.hanging import HANG, UNLIMITED, pass_limits_at

CPU = torch.device("cpu")
TAG = "dim:96"
"""A column with few checks, so that a run takes little longer than its start."""
PICKED = "numerics.attention_is_right*value_dim*"
"""The checks of that column."""
BRIEF = "contract.version_matches"
HANG_LIMIT = 10.0
"""Seconds that the plug-in that hangs is given; they pass when it does."""

FORWARD = """
import os, sys
from attn_backends.torch_reference import TorchReference

class Backend(TorchReference):
    name = {name!r}
    version = "7"
    contract_version = (1, 0)

    def forward(self, *inputs, **options):
        {fault}
        return super().forward(*inputs, **options)
"""
AT_IMPORT = """
import os, sys, torch
from attn_backends import register
from attn_backends.torch_reference import TorchReference

{fault}

class Backend(TorchReference):
    contract_version = (1, 0)
"""
WHEN_ASKED = """
import os
from attn_backends.torch_reference import TorchReference

class Backend(TorchReference):
    contract_version = (1, 0)

    def supports(self, spec, device):
        {fault}
"""
CRASHING = {"crashes_at_import": "driver", "crashes_when_asked": "device"}
"""What each misses."""
PLUG_INS = {
    "healthy": (FORWARD, "pass"),
    "crasher": (FORWARD, "print('no such kernel image', flush=True); os.abort()"),
    "hanger": (FORWARD, HANG.format(mark="MARK")),
    "quitter": (FORWARD, "sys.exit('licence expired')"),
    "no_exception": (FORWARD, "raise type('Abrupt', (BaseException,), {})('enough')"),
    "quits_at_import": (AT_IMPORT, "sys.exit('licence expired')"),
    "crashes_at_import": (AT_IMPORT, f"print('no such {CRASHING['crashes_at_import']}', flush=True); os.abort()"),
    "crashes_when_asked": (WHEN_ASKED, f"print('no such {CRASHING['crashes_when_asked']}', flush=True); os.abort()"),
    "cuda_at_import": (AT_IMPORT, "torch.cuda.init()"),
    "takes_ours_by_call": (AT_IMPORT, "register(TorchReference)"),
    "torch_reference": (FORWARD, "os.abort()"),
}
"""By the name that each declares; its package is called faulty-NAME."""


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every plug-in, and the name `rival` by two packages, on the path of this process and of its forks."""
    site = tmp_path_factory.mktemp("site")
    for name, (source, fault) in PLUG_INS.items():
        install_plug_in(
            site, f"faulty-{name}", name, source.format(name=name, fault=fault.replace("MARK", str(site / "hangs")))
        )
    for package in ("rivals-a", "rivals-b"):
        install_plug_in(site, package, "rival", FORWARD.format(name=package, fault="pass"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.setattr(registry, "_loaded", dict(registry._loaded))
        patch.setattr(registry, "_refused", {})
        patch.setattr(plug_ins, "_tried", {})
        pass_limits_at(site / "hangs", HANG_LIMIT, patch)
        fork_isolated(patch)
        yield


@dataclass(frozen=True)
class Checked:
    """What a command printed, and the reports it wrote."""

    result: Result
    reports: list[Report]


@pytest.fixture(scope="module")
def crashed(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """The check of a crash and then a sound backend."""
    folder = tmp_path_factory.mktemp("reports")
    result = run_command("check", "crasher", "healthy", "--only", PICKED, "--json", str(folder))
    return Checked(result, [Report.load(folder / f"check-{name}.json") for name in ("crasher", "healthy")])


def run_command(*words: str) -> Result:
    return CliRunner().invoke(main, [*words, "--device", "cpu"])


def word_of(matrix: Matrix, backend: str, tag: str = TAG) -> Status:
    return next(row for row in matrix.rows if row.backend == backend).cells[tag].status


REFUSALS = {
    "quits_at_import": ["does not load: SystemExit: licence expired"],
    "takes_ours_by_call": ["DuplicateBackend: backend 'torch_reference' is already registered"],
    "faulty-torch_reference:torch_reference": [
        "package faulty-torch_reference declares 'torch_reference', which is built in",
        "a backend name must be free",
    ],
    "rival": [
        "packages rivals-a and rivals-b all declare 'rival'",
        "Use rivals-a:rival or rivals-b:rival",
        "a backend name must be free",
    ],
}
"""By name, why it cannot be had."""
try:
    torch.zeros(1, device="cuda")  # where it works, the kit's check of it is in test_faults_in_the_kit.py
except (AssertionError, RuntimeError) as error:
    REFUSALS["cuda_at_import"] = ["'cuda_at_import' is registered but does not load: ", str(error).splitlines()[0]]
CRASHES = {name: f"the process ended with SIGABRT; it printed: no such {what}" for name, what in CRASHING.items()}


@pytest.mark.parametrize("name", REFUSALS)
def test_unusable_name_is_unavailable_with_same_reason(name: str) -> None:
    with pytest.raises(BrokenBackend) as refused:
        get(name)
    (result,) = check_backend(name, device=CPU, report=True).results
    assert result.outcome is Outcome.UNAVAILABLE and result.reason == str(refused.value)
    assert all(words in result.reason for words in REFUSALS[name])
    assert type(get("torch_reference")) is TorchReference


@pytest.mark.parametrize(
    ("name", "reason"), [("quitter", "SystemExit: licence expired"), ("no_exception", "Abrupt: enough")]
)
def test_system_exit_in_check_is_its_error(name: str, reason: str) -> None:
    report = check_backend(name, device=CPU, checks=["numerics.attention_is_right*base-single*", BRIEF], report=True)
    outcomes = {result.check: result.outcome for result in report.results}
    assert outcomes == {"numerics.attention_is_right": Outcome.ERROR, BRIEF: Outcome.PASS}
    assert any(result.reason.startswith(reason) for result in report.results)


@pytest.mark.parametrize("package", ["rivals-a", "rivals-b"])
def test_plug_in_with_contested_name_keeps_its_results(package: str) -> None:
    report = check_backend(f"{package}:rival", device=CPU, checks=[BRIEF], report=True)
    assert report.ok and report.backend == f"{package}:rival" and get(f"{package}:rival").name == package


def test_list_names_every_refusal_and_continues() -> None:
    entries = json.loads(run_command("list", "--json").stdout)["backends"]
    refused = {entry["name"]: " ".join(entry["reasons"]) for entry in entries if not entry["accepted"]}
    assert {"healthy", "torch_reference"}.isdisjoint(refused)
    assert names().count("torch_reference") == [entry["name"] for entry in entries].count("torch_reference") == 1
    for name, words in (REFUSALS | {name: [words] for name, words in CRASHES.items()}).items():
        assert all(part in refused[name] for part in words), name
    assert "of package faulty-crashes_at_import" in refused["crashes_at_import"]


def test_doctor_names_every_refusal_and_plug_in() -> None:
    findings = json.loads(run_command("doctor", "--json").stdout)
    backends, plug_in = (
        {found["subject"]: (found["status"], found["detail"]) for found in findings if found["topic"] == topic}
        for topic in ("backends", "plug-ins")
    )
    assert backends["healthy"][0] == backends["torch_reference"][0] == "ok"
    for name, words in (REFUSALS | {name: ["SIGABRT"] for name in CRASHES}).items():
        assert backends[name][0] == "failed" and words[-1] in backends[name][1], name
    assert plug_in["healthy"][1] == "faulty-healthy: faulty_healthy.Backend 7"
    assert plug_in["rivals-a:rival"][1] == "rivals-a: rivals_a.Backend 7"
    assert "torch_reference" not in plug_in
    assert plug_in["faulty-torch_reference:torch_reference"][0] == plug_in["crashes_at_import"][0] == "failed"


def test_check_names_crash_and_continues(crashed: Checked) -> None:
    result, (crasher, healthy) = crashed.result, crashed.reports
    assert result.exit_code == 1 and not crasher.ok and healthy.ok and healthy.version == "7"
    assert healthy.counts[Outcome.PASS] == sum(each.outcome is not Outcome.UNSUPPORTED for each in healthy.results)
    assert "error: numerics.attention_is_right[value_dim-decode]: the process ended with SIGABRT" in result.stdout
    assert "crasher: 4 checks = 0 pass, 1 error, 3 not_run" in result.stdout
    assert f"{crasher.summary()}\n" in result.stdout and f"{healthy.summary()}\n" in result.stdout
    assert "    tried: heads 4, KV heads 2" in result.stdout.partition(healthy.summary())[2]


def test_available_skips_backends_that_crash_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []

    def check_isolated(name: str, **_: object) -> Report:
        checked.append(name)
        return Report(backend=name, version="1", env=environment(CPU), command="", results=())

    monkeypatch.setattr(subprocess_runner, "check_isolated", check_isolated)
    result = run_command("check", "available")
    assert {"torch_reference", "healthy", "crasher", "rivals-a:rival"} <= {*checked}
    assert {"crashes_at_import", "crashes_when_asked"}.isdisjoint(checked)
    assert "not available: backend 'crashes_at_import' of package" in result.stderr


def test_unloadable_plug_in_is_unknown_with_reason() -> None:
    names = ("quits_at_import", "rival", "healthy")
    matrix = build_matrix([check_backend(name, device=CPU, checks=[BRIEF], report=True) for name in names])
    words = [word_of(matrix, name, "contract:declared") for name in names]
    assert words == [Status.UNKNOWN, Status.UNKNOWN, Status.VERIFIED]
    assert "licence expired" in to_html(matrix)


def test_crash_and_hang_are_broken_with_their_check(crashed: Checked) -> None:
    hung = MatrixRun(device=CPU, tags=(TAG,), limits=TimeLimits(check=HANG_LIMIT, backend=UNLIMITED))
    reports = [*crashed.reports, *hung.of(["hanger"])]
    words = (
        ("numerics.attention_is_right", "the process ended with SIGABRT; it printed: no such kernel image"),
        ("numerics.drawn_attention_is_right", "the process exceeded the limit of 10 s for a check and was killed"),
    )
    for report, (check, reason) in zip(reports[::2], words, strict=True):
        (error,) = [result for result in report.results if result.outcome is Outcome.ERROR]
        assert error.check == check and error.reason.startswith(reason)
    matrix = build_matrix(reports)
    statuses = [word_of(matrix, report.backend) for report in reports]
    assert statuses == [Status.BROKEN, Status.VERIFIED, Status.BROKEN]
