"""What the doctor reports, and that nothing it examines can end it."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from attn_backends import registry
from attn_backends.fa3_providers import PROVIDER_VARIABLE
from attn_backends.findings import Finding, FindingStatus
from attn_backends.torch_reference import TorchReference
from spec_decode.files import read_json
from spec_decode.graphs.emulator import EmulatedRuntime
from spec_decode.tools import doctor
from spec_decode.tools.doctor import examine
from tests.factories import register_as

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]


def findings(topic: str) -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine(CPU) if finding.topic == topic}


def providers() -> dict[str, Finding]:
    """Asked for alone: the registry would keep a backend that was loaded over a stand-in."""
    return {finding.subject: finding for finding in doctor._fa3_providers()}


def fa3_module(name: str) -> dict[str, ModuleType]:
    """sgl_kernel.flash_attn with an entry of that name."""

    def entry(
        q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, page_table: Any, cu_seqlens_q: Any, max_seqlen_q: Any,
        num_splits: Any,
    ) -> None:  # fmt: skip
        raise NotImplementedError

    package, module = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.flash_attn")
    setattr(module, name, entry)
    return {"sgl_kernel": package, "sgl_kernel.flash_attn": module}


def test_healthy_machine_has_no_failed_finding() -> None:
    assert [finding for finding in examine(CPU) if finding.status is FindingStatus.FAILED] == []


def test_capture_and_loop_are_run_with_memory_reported() -> None:
    found = findings("graphs")
    assert found.keys() == {"capture and replay", "device loop"}
    assert all(
        f.status is FindingStatus.OK and "emulated on the CPU" in f.detail and "MiB" in f.detail for f in found.values()
    )


def test_loop_with_wrong_iteration_count_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(self: EmulatedRuntime, first: Any, body: Any, continue_flag: torch.Tensor, limit: int) -> Any:
        return self.capture(first)

    monkeypatch.setattr(EmulatedRuntime, "capture_loop", once)
    found = findings("graphs")["device loop"]
    assert found.status is FindingStatus.FAILED and "it ended at 1" in found.detail


def test_capture_that_executes_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatedRuntime, "capture", lambda self, fn: SimpleNamespace(replay=fn, run=fn()))
    found = findings("graphs")["capture and replay"]
    assert found.status is FindingStatus.FAILED and "it set a cell of 0 to 1" in found.detail


def test_unsupported_loop_is_reported_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "loop_unsupported_reason", lambda device: "it needs the package cuda.bindings")
    monkeypatch.setattr(EmulatedRuntime, "capture_loop", lambda *_: pytest.fail("a loop was captured"))
    found = findings("graphs")["device loop"]
    assert (found.status, found.detail) == (FindingStatus.ABSENT, "it needs the package cuda.bindings")


def test_absent_fa3_providers_name_what_to_install() -> None:
    found = providers()
    assert found.keys() == {"upstream", "vllm", "sgl"}
    assert {finding.status for finding in found.values()} == {FindingStatus.ABSENT}
    for name, remedy in {"upstream": "'.[flash-attn]'", "vllm": "'.[vllm]'", "sgl": "sglang-kernel"}.items():
        assert remedy in found[name].detail


@pytest.mark.parametrize(("provider", "used"), [("", True), ("sgl", True), ("vllm", False)])
def test_installed_provider_reports_if_it_is_used(monkeypatch: pytest.MonkeyPatch, provider: str, used: bool) -> None:
    monkeypatch.setenv(PROVIDER_VARIABLE, provider)
    for name, module in fa3_module("flash_attn_with_kvcache").items():
        monkeypatch.setitem(sys.modules, name, module)
    found = providers()["sgl"]
    assert found.status is FindingStatus.OK and found.detail.endswith(", in use") is used


def test_unusable_provider_fails_with_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in fa3_module("another_entry").items():
        monkeypatch.setitem(sys.modules, name, module)
    found = providers()["sgl"]
    assert found.status is FindingStatus.FAILED and "it has no flash_attn_with_kvcache" in found.detail


def test_every_backend_is_reported_with_specs_or_reason() -> None:
    found = findings("backends")
    assert found.keys() == {*registry.names(), *registry.state_names()}
    assert found["torch_reference"].status is FindingStatus.OK
    assert "the gated delta rule; Kimi Delta Attention" in found["torch_state"].detail
    assert "decode of a common 8B model" in found["torch_reference"].detail
    assert found["flash_attn3"].status is FindingStatus.ABSENT


@pytest.fixture
def registry_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for state in ("_registered", "_loaded"):
        monkeypatch.setattr(registry, state, dict(getattr(registry, state)))


def fail(*args: object) -> Any:
    raise KeyError("no table")


@pytest.mark.parametrize(
    ("supports", "detail"),
    [
        (fail, "KeyError: 'no table'"),
        (lambda *args: None, "AttributeError"),
        (lambda *args: sys.exit(), "SystemExit"),
    ],
    ids=["raises", "no answer", "leaves"],
)
def test_backend_that_raises_fails_by_name(supports: Any, detail: str, registry_as_it_was: None) -> None:
    register_as("odd", type("Odd", (TorchReference,), {"supports": supports}))
    found = findings("backends")
    assert found["odd"].status is FindingStatus.FAILED and detail in found["odd"].detail
    assert found.keys() == {*registry.names(), *registry.state_names()}


def test_backend_without_package_is_absent_not_failed(
    registry_as_it_was: None,
) -> None:
    register_as("absent", lambda: import_module("a_package_that_is_not_here"))
    register_as("failing", fail)
    found = findings("backends")
    assert (found["absent"].status, found["failing"].status) == (FindingStatus.ABSENT, FindingStatus.FAILED)


@pytest.fixture
def declared(registry_as_it_was: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package declares `torch_reference` and `mine`, both ours in truth; nothing is loaded in a subprocess for it."""
    value = "attn_backends.torch_reference:TorchReference"
    points = [EntryPoint(name, value, "attn_backends") for name in ("torch_reference", "mine")]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    monkeypatch.setattr(doctor, "try_plug_ins", dict)


def test_plug_in_with_built_in_name_fails(declared: None) -> None:
    found = findings("plug-ins")
    assert found.keys() == {"unknown:torch_reference", "mine"}
    shadow = found["unknown:torch_reference"]
    assert shadow.status is FindingStatus.FAILED and "'torch_reference', which is built in" in shadow.detail
    assert found["mine"].status is FindingStatus.OK and "torch_reference.TorchReference" in found["mine"].detail


def test_plug_in_with_replaced_name_is_refused(declared: None) -> None:
    register_as("mine", TorchReference, replace=True)
    found = findings("plug-ins")["mine"]
    assert found.status is FindingStatus.REFUSED and "a call registered another backend under its name" in found.detail


VERSIONS = {
    "tested": ("2.13.0+cpu", "2.13.0+cpu; tested: 2.11.0 (oldest), 2.13.0 (every commit), 2.13.0 (newest)"),
    "between": ("2.12.1", "2.12.1; tested: 2.11.0 (oldest)"),
    "newer": ("2.13.1", "2.13.1; untested, newer than those tested; tested: "),
    "much newer": ("10.0", "10.0; untested, newer than those tested; tested: "),
    "older": ("2.9.0", "2.9.0; untested, older than those tested; tested: "),
}


@pytest.mark.parametrize(("release", "detail"), VERSIONS.values(), ids=VERSIONS)
def test_untested_release_is_marked(release: str, detail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: release)
    monkeypatch.setitem(doctor.TESTED, "torch", ("2.11.0", "2.13.0", "2.13.0"))
    packages = {finding.subject: finding for finding in doctor._packages()}
    assert packages["torch"].detail.startswith(detail) and packages["vllm"].detail == release


@pytest.mark.parametrize("name", ["torch", "triton", "transformers"])
def test_tested_releases_match_the_constraints(name: str) -> None:
    def pinned(file: str) -> str:
        return re.findall(rf"^{name}==([\d.]+)", (ROOT / file).read_text(), re.MULTILINE)[0]

    files = ("constraints-oldest.txt", "constraints.txt", "constraints-newest.txt")
    assert doctor.TESTED[name] == tuple(map(pinned, files))


def test_flashinfer_called_tested_is_that_of_the_gpu_reports() -> None:
    reports = (read_json(path) for path in sorted(ROOT.glob("reports/h*/*.json")))
    used = {package for report in reports for package in report["env"]["packages"]}
    assert {f"flashinfer-python {each}" for each in doctor.TESTED["flashinfer-python"]} == {
        package for package in used if package.startswith("flashinfer-python ")
    }


def test_oldest_tested_releases_match_requirements() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert all(f'"{name}>={doctor.TESTED[name][0].removesuffix(".0")}' in project for name in ("torch", "triton"))
    assert f'"transformers>={doctor.TESTED["transformers"][0].removesuffix(".0")}"' in project
