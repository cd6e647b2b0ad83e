"""Both backends pass their conformance kit on the CPU, the way a backend author would run it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_backends import Feature, Sizes, get, registry, unregister
from attn_backends.torch_reference import TorchReference
from attn_backends.torch_state import TorchState
from builders import Recurrence, ReferenceBuilder, ReferenceMetadata
from spec_decode.conformance import (
    Check,
    ConformanceFailure,
    check_backend,
    iter_checks,
    parametrize_with_checks,
    runner,
)
from spec_decode.conformance.coverage import FAMILIES, ON_REQUEST
from spec_decode.conformance.runner import check_list
from spec_decode.testing.batches import Case
from spec_decode.testing.outcome import Outcome
from tests.factories import register_as
from tests.forked import Fork
from tests.kit_rounds import OFTEN, STRATEGIES_AGREE, runs_often
from tests.mutants.mutant import derived, with_builder
from tests.telling_checks import telling

CPU = torch.device("cpu")
DEVICE_WORK = "builder.advance_is_device_work"

ON_A_DEVICE = "drafter.a_round_never_waits[k4-n3-device_loop]"
"""The one check that the CPU cannot try."""


def params_of(backend: str) -> dict[Check, Any]:
    """Its checks, as an author has them, and the test's parameter of each."""
    params = parametrize_with_checks(backend, device=CPU).args[1]
    return dict(zip(iter_checks(backend, device=CPU), params, strict=True))


def reference_checks() -> list[Any]:
    return [
        param if runs_often(check) else pytest.param(*param.values, id=param.id, marks=[*param.marks, pytest.mark.slow])
        for backend in ("torch_reference", "torch_state")
        for check, param in params_of(backend).items()
        if check.id != ON_A_DEVICE
    ]


def checks_of_another(backend: str) -> list[Any]:
    params = params_of(backend)
    return [params[check] for check in telling(params)]


def test_quick_rounds_cover_each_draft_and_request_count() -> None:
    checks = [check.case for check in iter_checks("torch_reference", device=CPU) if check.name == STRATEGIES_AGREE]
    for part in (0, 1):
        assert {case.split("-")[part] for case in OFTEN[STRATEGIES_AGREE]} == {case.split("-")[part] for case in checks}


@pytest.mark.parametrize("check", reference_checks())
def test_reference_passes_every_check_without_refusal(check: Callable[[], None]) -> None:
    """A refusal is a failure here: a check that the reference skips would show no mutant of it."""
    try:
        check()
    except pytest.skip.Exception as refusal:
        pytest.fail(str(refusal))


@pytest.mark.parametrize("check", checks_of_another("triton_paged"))
def test_triton_paged_passes_its_checks(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("backend", ["torch_reference", "triton_paged"])
def test_every_family_has_checks_with_unique_ids(backend: str) -> None:
    checks = iter_checks(backend, device=CPU)
    assert {check.family for check in checks} == {*FAMILIES} - {*ON_REQUEST, "state"}
    assert len({check.id for check in checks}) == len(checks)


def test_quick_plan_has_first_cases_and_attention_specs() -> None:
    every, quick = (check_list("torch_reference", device=CPU, quick=quick).checks for quick in (False, True))
    attention = {check.case for check in quick if check.name == "numerics.attention_is_right"}
    cases = {check.name: check.case for check in quick if check.name != "numerics.attention_is_right"}

    single = {check.case for check in every if check.name.startswith("numerics.") and check.case.endswith("-single")}
    assert attention == single and len(single) > 20
    assert cases["builder.advance_attends_right"] == "base-single" and cases["drafter.strategies_agree"] == "k1-n1"
    assert len(quick) == len(attention) + len(cases)
    assert {check.name for check in every} == {check.name for check in quick}


def test_backend_that_fails_to_load_is_unavailable() -> None:
    register_as("missing", lambda: import_module("no_such_package"))
    try:
        report = check_backend("missing", device=CPU, report=True)
    finally:
        unregister("missing")

    assert [result.outcome for result in report.results] == [Outcome.UNAVAILABLE]
    with pytest.raises(ConformanceFailure, match=r"nothing is proven: .*no_such_package"):
        report.raise_if_failed()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checks": "builder.*"}, "checks must be a list"),
        ({"tags": "page:*"}, "tags must be a list"),
        ({"device": "cpu"}, r"device must be a torch.device, got 'cpu'. Pass torch.device\('cpu'\)"),
    ],
)
def test_string_instead_of_list_or_device_is_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_backend("torch_reference", **options)


def test_a_run_without_checks_is_not_ok() -> None:
    assert not check_backend("torch_reference", device=CPU, checks=["no.such.check"], report=True).ok


class Crashes(TorchReference):
    name = "crashes"

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("no kernel image")


def test_crash_is_an_error_and_other_checks_run() -> None:
    checks = ["contract.name*", "numerics.attention_is_right[[]base-single]"]
    error = r"error: numerics.attention_is_right\[base-single\]: RuntimeError: no kernel image \(in forward"
    with pytest.raises(ConformanceFailure, match=error) as failed:
        check_backend(Crashes(), device=CPU, checks=checks)
    report = check_backend(Crashes(), device=CPU, checks=checks, report=True)
    for found in (failed.value.report, report):
        assert [result.outcome for result in found.results] == [Outcome.PASS, Outcome.ERROR]
        assert found.failures == found.results[1:]
    assert check_backend("torch_reference", device=CPU, checks=checks).failures == ()


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())


class IgnoresTheQuerysStrides(TorchReference):
    def forward(self, query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return super().forward(dense(query), *args, **options)


class IgnoresTheKeysStrides(TorchReference):
    def write_kv(self, key: torch.Tensor, value: torch.Tensor, *args: Any) -> None:
        super().write_kv(dense(key), dense(value), *args)


@pytest.mark.parametrize("backend", [IgnoresTheQuerysStrides, IgnoresTheKeysStrides])
def test_ignored_strides_are_named(backend: type[TorchReference]) -> None:
    checks = ["builder.build_reuses_its_addresses[[]base-decode]", "numerics.attention_is_right[[]base-decode]"]
    report = check_backend(backend(), device=CPU, checks=checks, report=True)
    assert [result.outcome for result in report.results] == [Outcome.FAIL] * 2
    assert all("follow the strides of key, value and query" in result.reason for result in report.results)


def test_forward_returning_none_is_named() -> None:
    nothing = type("Nothing", (TorchReference,), {"forward": lambda self, *args, **options: None})()
    report = check_backend(nothing, device=CPU, checks=["numerics.attention_is_right[[]base-single]"], report=True)
    (result,) = report.results
    assert result.outcome is Outcome.FAIL and "got: a NoneType" in result.reason


def test_parametrize_accepts_families_and_quick() -> None:
    def names(**options: Any) -> set[str]:
        return {param.id for param in parametrize_with_checks("torch_reference", device=CPU, **options).args[1]}

    some, quick = names(families=["contract", "builder"]), names(families=["contract", "builder"], quick=True)
    assert {name.split("-")[1].split(".")[0] for name in some} == {"contract", "builder"}
    assert set() < quick < some
    assert {name.split("[")[0] for name in quick} == {name.split("[")[0] for name in some}


@pytest.mark.parametrize("families", [["builders"], "contract", ["contract", "numeric"]])
def test_unknown_family_error_lists_families(families: Any) -> None:
    for ask in (check_backend, iter_checks, parametrize_with_checks):
        with pytest.raises(ValueError, match=r"families must be among contract, builder, .*, got "):
            ask("torch_reference", device=CPU, families=families)


BROKEN = """
import torch
from attn_backends import register
from attn_backends.torch_reference import TorchReference
from spec_decode.conformance import parametrize_with_checks

@register
class Broken(TorchReference):
    name = "broken"

    def forward(self, *inputs, **options):
        if inputs[0].shape[0] > 1:
            raise RuntimeError("no kernel image")
        return super().forward(*inputs, **options) + 1

@parametrize_with_checks("broken", device=torch.device("cpu"), families=["numerics"])
def test_conformance(check):
    check()
"""


def test_pytest_failure_shows_repro_without_kit_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_broken.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("PYTEST")]:
        monkeypatch.delenv(name)
    cases = {
        "base-single": ["contract: ", "expected: "],
        "base-verify": ['raise RuntimeError("no kernel image")', "test_broken.py:13: RuntimeError"],
    }
    # A fork has no thread that ends what pytest's faulthandler waits for.
    chosen = " or ".join(f"attention_is_right[{case}]" for case in cases)
    args = ["-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-k", chosen]
    code = f"import pytest; raise SystemExit(pytest.main({args!r}))"
    with (tmp_path / "printed").open("w+b") as printed:
        Fork([sys.executable, "-c", code], stdout=printed, start_new_session=True).wait()
    output = (tmp_path / "printed").read_text().split("= FAILURES =")[1].split("= short test summary info =")[0]
    failures = output.split("_ test_conformance[")[1:]
    for failure, (case, shown) in zip(failures, cases.items(), strict=True):
        repeat = f"attn-backends check broken --device cpu --only 'numerics.attention_is_right*{case}*'"
        assert all(part in failure for part in shown) and failure.count(repeat) == 1
        assert "spec_decode/" not in failure and failure.count(".py:") == 2 * ("raise" in shown[0])


def test_device_read_is_reported_with_its_line() -> None:
    def advance(self: ReferenceBuilder, metadata: ReferenceMetadata) -> None:
        int(metadata.seq_lens.max())

    report = check_backend(
        with_builder(derived("Reads", advance=advance)), device=CPU, checks=[DEVICE_WORK], report=True
    )

    assert {result.outcome for result in report.results} == {Outcome.FAIL}
    assert all("(in advance, test_conformance.py:" in result.reason for result in report.results)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (("seq_lens", "positions", "slot_mapping", "kv_start"), "got: kv_end changed and is not declared"),
        ((*ReferenceBuilder.step_fields, "block_table"), "got: block_table is declared and never changed"),
    ],
)
def test_wrong_step_fields_are_reported(fields: tuple[str, ...], says: str) -> None:
    declaring = with_builder(derived("Declares", step_fields=fields))
    (result,) = check_backend(declaring, device=CPU, checks=["builder.step_fields_are_complete"], report=True).results

    assert result.outcome is Outcome.FAIL and result.reason.endswith(says)


def test_advance_checks_use_smallest_and_largest_page() -> None:
    def pages(page_sizes: Sizes) -> set[int]:
        able = replace(TorchReference.capabilities, page_sizes=page_sizes)
        paged = type("Paged", (TorchReference,), {"capabilities": able})()
        checks = iter_checks(paged, device=CPU, families=["builder"])
        checks = [check for check in checks if check.name == "builder.advance_means_a_rebuild"]
        return {check.value.spec.page_size for check in checks if isinstance(check.value, Case)}

    assert pages(Sizes()) == {4, 16, 128}
    assert pages(Sizes(maximum=64)) == {4, 16, 64}
    assert pages(Sizes(minimum=16, power_of_two=True)) == {16, 64, 128}
    assert pages(Sizes(minimum=64, maximum=64)) == {64}


@pytest.mark.parametrize(
    ("feature", "checks", "refused"),
    [
        (Feature.SINKS, [f"numerics.*{which}*" for which in ("sinks", "deepseek", "[[]base-")], "sinks"),
        (Feature.GQA, ["contract.*", "numerics.*-single*"], ""),
    ],
)
def test_missing_feature_is_unsupported_not_failed(feature: Feature, checks: list[str], refused: str) -> None:
    able = replace(TorchReference.capabilities, features=TorchReference.capabilities.features - {feature})
    without = type("Without", (TorchReference,), {"name": "without", "capabilities": able})()
    report = check_backend(without, device=CPU, checks=[*checks, "refusal.*"], report=True)

    assert report.ok and report.counts[Outcome.PASS] > 10, report.summary()
    cases = [result.case for result in report.results if result.outcome is Outcome.UNSUPPORTED]
    assert any(case.startswith(refused) for case in cases)


class NarrowState(TorchState):
    name, contract_version = "narrow_state", (1, 3)
    capabilities = replace(
        TorchState.capabilities,
        recurrences=(Recurrence.KDA,),
        key_dims=Sizes(minimum=64, power_of_two=True),
        conv_widths=Sizes(minimum=3, maximum=3),
        journals=Sizes(minimum=16),
        features=frozenset(),
    )


def test_narrow_state_claims_are_unsupported_not_failed() -> None:
    checks = ["contract.*", *(f"state.{name}*" for name in ("unclaimed", "bad", "trees", "rollback", "windows"))]
    report = check_backend(NarrowState(), device=CPU, checks=checks, report=True)

    assert report.ok and report.counts[Outcome.PASS] > 10, report.summary()
    refused = {result.check for result in report.results if result.outcome is Outcome.UNSUPPORTED}
    assert refused == {
        f"state.{name}" for name in ("trees_follow_the_path", "rollback_is_bitwise", "windows_roll_back")
    }


class Convolutions(TorchState):
    """Serves no matrices; the limits of their dims say nothing."""

    name, contract_version = "convolutions", (1, 3)
    capabilities = replace(
        TorchState.capabilities,
        recurrences=(Recurrence.CONV,),
        key_dims=Sizes(among=(512,)),
        value_dims=Sizes(among=(512,)),
    )


def test_backend_of_convolutions_alone_is_checked() -> None:
    checks = ["contract.*", *(f"state.{name}*" for name in ("unclaimed", "bad", "trees", "rows", "windows"))]
    report = check_backend(Convolutions(), device=CPU, checks=checks, report=True)

    refused = {result.reason for result in report.results if result.outcome is Outcome.UNSUPPORTED}
    assert report.ok and len(refused) == 1 and "recurrence must be conv, got ssd" in str(refused), report.summary()


def test_fixture_gives_every_available_backend(attn_backend: object) -> None:
    assert attn_backend in [get(name) for name in ("torch_reference", "triton_paged", "sparse_swa_mla", "triton_mla")]


def test_plug_in_report_names_package_and_version(monkeypatch):
    declared = [registry.PlugIn("theirs", "pytest"), registry.PlugIn("unknown", "no-such-package")]
    monkeypatch.setattr(registry, "plug_ins", lambda: declared)
    assert runner._package_of("theirs") == f"pytest {pytest.__version__}"
    assert (runner._package_of("unknown"), runner._package_of("triton_paged")) == ("no-such-package", "")


def test_low_scores_are_unsupported_if_claimed_masked():
    class Masking(TorchReference):
        name, capabilities = "masking", replace(TorchReference.capabilities, lowest_score=-5e4)

    edge = "numerics.edges_are_right[[]one_key_of_low_score]"
    (result,) = check_backend(Masking(), device=CPU, checks=[edge], report=True).results
    assert result.outcome is Outcome.UNSUPPORTED
    assert result.reason == "claims that scores below -50,000 can count as masked"
