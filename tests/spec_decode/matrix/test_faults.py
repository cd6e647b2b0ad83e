"""Plug-ins with one fault each, installed together: each is named, and none takes another's results with it.

Those that end or hold up their process are checked as the matrix does it, each in a process of its own. What a plug-in
may do to the kit is in test_faults_in_the_kit.py, how plug-ins are tried before they are loaded in test_plug_ins.py.
"""

from __future__ import annotations

import json
import os
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
from spec_decode.matrix import Matrix, Status, build_matrix, to_markdown
from spec_decode.testing.outcome import Outcome
from spec_decode.tools import plug_ins
from tests.factories import install_plug_in
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
PLUG_INS = {
    "healthy": (FORWARD, "pass"),
    "crasher": (FORWARD, "print('no such kernel image', flush=True); os.abort()"),
    "hanger": (FORWARD, HANG.format(mark="MARK")),
    "quitter": (FORWARD, "sys.exit('licence expired')"),
    "no_exception": (FORWARD, "raise type('Abrupt', (BaseException,), {})('enough')"),
    "quits_at_import": (AT_IMPORT, "sys.exit('licence expired')"),
    "crashes_at_import": (AT_IMPORT, "print('no such driver', flush=True); os.abort()"),
    "crashes_when_asked": (WHEN_ASKED, "print('no such device', flush=True); os.abort()"),
    "cuda_at_import": (AT_IMPORT, "torch.cuda.init()"),
    "takes_ours_by_call": (AT_IMPORT, "register(TorchReference)"),
    "torch_reference": (FORWARD, "os.abort()"),
}
"""By the name that each declares; its package is called faulty-NAME."""


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every plug-in, and the name `rival` by two packages, on the path of this process and of those it starts."""
    site = tmp_path_factory.mktemp("site")
    for name, (source, fault) in PLUG_INS.items():
        install_plug_in(
            site, f"faulty-{name}", name, source.format(name=name, fault=fault.replace("MARK", str(site / "hangs")))
        )
    for package in ("rivals-a", "rivals-b"):
        install_plug_in(site, package, "rival", FORWARD.format(name=package, fault="pass"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
        patch.setattr(registry, "_loaded", dict(registry._loaded))
        patch.setattr(registry, "_refused", {})
        patch.setattr(plug_ins, "_tried", {})
        pass_limits_at(site / "hangs", HANG_LIMIT, patch)
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
    result = say("check", "crasher", "healthy", "--only", PICKED, "--json", str(folder))
    return Checked(result, [Report.load(folder / f"check-{name}.json") for name in ("crasher", "healthy")])


@pytest.fixture(scope="module")
def together(crashed: Checked) -> list[Report]:
    """The reports of crasher, healthy, hanger."""
    hung = MatrixRun(device=CPU, tags=(TAG,), limits=TimeLimits(check=HANG_LIMIT, backend=UNLIMITED))
    return [*crashed.reports, *hung.of(["hanger"])]


def say(*words: str) -> Result:
    return CliRunner().invoke(main, [*words, "--device", "cpu"])


def word_of(matrix: Matrix, backend: str, tag: str = TAG) -> Status:
    return next(row for row in matrix.rows if row.backend == backend).cells[tag].status


def refusal(name: str) -> str:
    """Why a name cannot be had; its report says the same."""
    with pytest.raises(BrokenBackend) as refused:
        get(name)
    report = check_backend(name, device=CPU, report=True)
    assert not report.ok and [result.outcome for result in report.results] == [Outcome.UNAVAILABLE]
    assert report.results[0].reason == str(refused.value)
    return str(refused.value)


def test_importing_cuda_where_there_is_none_is_refused_in_the_plug_ins_own_words() -> None:
    if torch.cuda.is_available():
        pytest.skip("initialising CUDA works here; the kit's check of it is in test_faults_in_the_kit.py")
    assert refusal("cuda_at_import").startswith("backend 'cuda_at_import' is registered but does not load: ")
    with pytest.raises((AssertionError, RuntimeError)) as torchs:
        torch.zeros(1, device="cuda")
    assert str(torchs.value).splitlines()[0] in refusal("cuda_at_import")


def test_leaving_python_at_import_is_refused_and_leaves_nothing() -> None:
    assert "does not load: SystemExit: licence expired" in refusal("quits_at_import")


@pytest.mark.parametrize(
    ("name", "reason"), [("quitter", "SystemExit: licence expired"), ("no_exception", "Abrupt: enough")]
)
def test_leaving_python_in_a_check_is_that_checks_error(name: str, reason: str) -> None:
    report = check_backend(name, device=CPU, checks=["numerics.attention_is_right*base-single*", BRIEF], report=True)
    outcomes = {result.check: result.outcome for result in report.results}
    assert outcomes == {"numerics.attention_is_right": Outcome.ERROR, BRIEF: Outcome.PASS}
    assert any(result.reason.startswith(reason) for result in report.results)


def test_declaring_a_name_of_ours_is_refused_and_the_name_stays_ours() -> None:
    assert "faulty-torch_reference:torch_reference" in names() and names().count("torch_reference") == 1
    words = refusal("faulty-torch_reference:torch_reference")
    assert "package faulty-torch_reference declares 'torch_reference', which is built in" in words
    assert type(get("torch_reference")) is TorchReference


def test_registering_a_name_of_ours_at_import_is_refused_and_the_name_stays_ours() -> None:
    words = refusal("takes_ours_by_call")
    assert "DuplicateBackend: backend 'torch_reference' is already registered" in words
    assert type(get("torch_reference")) is TorchReference


def test_a_name_that_two_plug_ins_declare_means_neither_and_says_how_to_ask_for_each() -> None:
    words = refusal("rival")
    assert "packages rivals-a and rivals-b all declare 'rival'" in words
    assert "Ask for rivals-a:rival or rivals-b:rival" in words


@pytest.mark.parametrize("package", ["rivals-a", "rivals-b"])
def test_a_plug_in_whose_name_is_contested_keeps_its_results(package: str) -> None:
    report = check_backend(f"{package}:rival", device=CPU, checks=[BRIEF], report=True)
    assert report.ok and report.backend == f"{package}:rival" and get(f"{package}:rival").name == package


def test_list_names_every_refusal_and_goes_on() -> None:
    entries = {entry["name"]: entry for entry in json.loads(say("list", "--json").stdout)["backends"]}
    assert entries["healthy"]["accepted"] and entries["torch_reference"]["accepted"]
    refused = {name: " ".join(entry["reasons"]) for name, entry in entries.items() if not entry["accepted"]}
    assert "SystemExit: licence expired" in refused["quits_at_import"]
    assert "does not load" in refused["takes_ours_by_call"]
    assert "which is built in" in refused["faulty-torch_reference:torch_reference"]
    assert "rivals-a and rivals-b" in refused["rival"]
    assert "of package faulty-crashes_at_import" in refused["crashes_at_import"]
    assert "the process ended with SIGABRT; it printed: no such driver" in refused["crashes_at_import"]
    assert "the process ended with SIGABRT; it printed: no such device" in refused["crashes_when_asked"]


def test_doctor_names_every_refusal_and_goes_on() -> None:
    findings = json.loads(say("doctor", "--json").stdout)
    backends = {finding["subject"]: finding for finding in findings if finding["topic"] == "backends"}
    assert backends["healthy"]["status"] == backends["torch_reference"]["status"] == "ok"
    assert "licence" in backends["quits_at_import"]["detail"]
    assert "already registered" in backends["takes_ours_by_call"]["detail"]
    for name in ("faulty-torch_reference:torch_reference", "rival"):
        assert "a backend name must be free" in backends[name]["detail"]
    for name in ("crashes_at_import", "crashes_when_asked"):
        assert backends[name]["status"] == "failed" and "SIGABRT" in backends[name]["detail"]


def test_doctor_tells_each_plug_in_under_the_name_that_it_is_had_by() -> None:
    found = {f["subject"]: f for f in json.loads(say("doctor", "--json").stdout) if f["topic"] == "plug-ins"}
    assert found["healthy"]["detail"] == "faulty-healthy: faulty_healthy.Backend 7"
    assert found["rivals-a:rival"]["detail"] == "rivals-a: rivals_a.Backend 7"
    assert "torch_reference" not in found and found["faulty-torch_reference:torch_reference"]["status"] == "failed"
    assert found["crashes_at_import"]["status"] == "failed"


def test_check_names_a_crash_and_goes_on(crashed: Checked) -> None:
    result, reports = crashed.result, crashed.reports
    assert result.exit_code == 1 and [report.ok for report in reports] == [False, True]
    assert "error: numerics.attention_is_right[value_dim-decode]: the process ended with SIGABRT" in result.stdout
    assert "crasher: 4 checks = 0 pass, 1 error, 3 not_run" in result.stdout
    assert f"{reports[0].summary()}\n" in result.stdout and f"{reports[1].summary()}\n" in result.stdout
    assert "claimed and never tried: " in result.stdout.splitlines()[-1]


def test_what_is_available_is_found_without_what_crashes_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def check_isolated(name: str, **_: object) -> Report:
        asked.append(name)
        return Report(backend=name, version="1", env=environment(CPU), command="", results=())

    monkeypatch.setattr(subprocess_runner, "check_isolated", check_isolated)
    result = say("check", "available")
    assert {"torch_reference", "healthy", "crasher", "rivals-a:rival"} <= {*asked}
    assert {"crashes_at_import", "crashes_when_asked"}.isdisjoint(asked)
    assert "not available: backend 'crashes_at_import' of package" in result.stderr


def test_the_matrix_shows_no_evidence_for_a_plug_in_that_does_not_load_but_the_reason() -> None:
    names = ("quits_at_import", "rival", "healthy")
    matrix = build_matrix([check_backend(name, device=CPU, checks=[BRIEF], report=True) for name in names])
    words = [word_of(matrix, name, "contract:declared") for name in names]
    assert words == [Status.UNKNOWN, Status.UNKNOWN, Status.VERIFIED]
    assert "licence expired" in to_markdown(matrix)


def test_a_crash_is_named_with_its_check_and_last_words(together: list[Report]) -> None:
    crasher = together[0]
    (error,) = [result for result in crasher.results if result.outcome is Outcome.ERROR]
    assert error.check == "numerics.attention_is_right"
    assert "SIGABRT; it printed: no such kernel image" in error.reason


def test_a_hang_is_named_with_its_check_and_limit(together: list[Report]) -> None:
    hanger = together[2]
    (error,) = [result for result in hanger.results if result.outcome is Outcome.ERROR]
    assert error.check == "numerics.attention_is_right"
    assert error.reason.startswith("the process outlived the limit of 10 s for a check and was ended")


def test_a_backend_that_is_checked_after_a_crash_is_whole(together: list[Report]) -> None:
    healthy = together[1]
    assert healthy.ok and healthy.version == "7"
    assert healthy.counts[Outcome.PASS] == sum(result.outcome is not Outcome.UNSUPPORTED for result in healthy.results)


def test_the_matrix_shows_a_crash_and_a_hang_as_broken_beside_what_is_verified(together: list[Report]) -> None:
    matrix = build_matrix(together)
    words = [word_of(matrix, report.backend) for report in together]
    assert words == [Status.BROKEN, Status.VERIFIED, Status.BROKEN]
