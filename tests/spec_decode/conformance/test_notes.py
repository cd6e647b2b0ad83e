"""Notes that a run prints after its results: an advance below IN_GRAPH, untested claims, a backend of another name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch
from click.testing import CliRunner, Result

from attn_backends import AttentionBackend, registry
from attn_backends.torch_reference import TorchReference
from builders import CONTRACT_VERSION, AttentionBatch, AttentionSpec, ReferenceBuilder, ReferenceMetadata
from spec_decode.cli.check import CheckRun
from spec_decode.cli.main import main
from spec_decode.conformance import check_backend
from spec_decode.conformance.notes import coverage_notes
from spec_decode.conformance.report import Result as CheckResult
from spec_decode.conformance.runner import check_list
from spec_decode.testing.outcome import Outcome
from tests.factories import register_as
from tests.foreseen import Foreseen

CPU = torch.device("cpu")
QUICK = ("--device", "cpu", "--only", "contract.version_matches")


class LosesItsClaim(ReferenceBuilder):
    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> ReferenceMetadata:
        return super().build(batch, horizon=horizon)


class Silent(TorchReference):
    name = "silent"
    builder = LosesItsClaim


class Ahead(TorchReference):
    name = "ahead"
    contract_version = (CONTRACT_VERSION[0], CONTRACT_VERSION[1] + 1)


class Misnamed(TorchReference):
    name = "another_name"


class MisnamedBefore(Misnamed):
    contract_version = (1, 0)


@pytest.fixture
def plug_in() -> Iterator[Callable[[str, type[AttentionBackend]], None]]:
    added: list[str] = []

    def add(name: str, backend: type[AttentionBackend]) -> None:
        register_as(name, backend)
        added.append(name)

    yield add
    for name in added:
        registry.unregister(name)


@pytest.fixture
def run() -> Callable[..., Result]:
    return lambda *words: CliRunner().invoke(main, ["check", *words])


def pass_(result: CheckResult) -> CheckResult:
    return msgspec.structs.replace(result, outcome=Outcome.PASS)


def notes(backend: str | AttentionBackend, *checks: str) -> list[str]:
    texts: list[str] = []
    only = checks or ("contract.version_matches",)
    check_backend(backend, device=CPU, checks=only, on_note=texts.append, report=True)
    return texts


def test_full_run_notes_claims_without_passed_check() -> None:
    planned = check_list("torch_reference", device=CPU, quick=True)
    passed = msgspec.structs.replace(planned.report, results=tuple(map(pass_, planned.report.results)))
    (unpassed, sizes, *drawn) = coverage_notes(passed, planned.checks, every=True)

    assert unpassed.startswith("claimed, but no passed check has them: ") and "page:24" in unpassed
    assert sizes.startswith("tried: heads 1 to 128 (11 sizes), KV heads 1 to ") and "lengths 1 to " in sizes
    assert drawn[0].startswith("drawn: 240 cases from seed 0, with 3,3")
    assert len([*coverage_notes(passed, planned.checks, every=False)]) == 1


def test_partial_run_notes_only_claims_it_could_cover() -> None:
    planned = check_list("torch_reference", device=CPU, checks=["numerics.attention_is_right[[]sinks-decode]"])
    refused = tuple(msgspec.structs.replace(each, outcome=Outcome.UNSUPPORTED) for each in planned.report.results)
    report = msgspec.structs.replace(planned.report, results=refused)

    (unpassed,) = coverage_notes(report, planned.checks, every=planned.every)
    assert "feature:sinks" in unpassed and "contract:declared" not in unpassed and not planned.every
    passed = msgspec.structs.replace(report, results=tuple(map(pass_, refused)))
    (sizes,) = coverage_notes(passed, planned.checks, every=False)
    assert sizes.startswith(
        "tried: heads 4, KV heads 2, groups 2, dims 64, pages 16, rows 5, query tokens 1, lengths 1 to"
    )
    claimless = {column: msgspec.structs.replace(claim, claimed=False) for column, claim in report.claims.items()}
    assert [*coverage_notes(msgspec.structs.replace(report, claims=claimless), planned.checks, every=False)] == []


def test_soak_notes_only_strategy_columns() -> None:
    planned = check_list("torch_reference", device=CPU, families=["soak"])
    (note,) = coverage_notes(planned.report, planned.checks, every=planned.every)
    named = note.partition(": ")[2].partition(". ")[0].split(", ")
    assert named and all(column.startswith("strategy:") for column in named)


def test_class_in_no_drawn_case_is_noted() -> None:
    class NoGroupsOf5(TorchReference):
        def unsupported_reasons(self, spec: AttentionSpec, device: torch.device) -> list[str]:
            return ["group_size must not be 5"] if spec.group_size == 5 else []

    planned = check_list(NoGroupsOf5(), device=CPU, checks=["numerics.drawn_attention_is_right"])
    assert [*coverage_notes(planned.report, planned.checks, every=True)][-1] == (
        "in no drawn case, because it is refused or costs too much: group_size 5"
    )


def test_quick_run_notes_skipped_cases(run: Callable[..., Result]) -> None:
    (text,) = (note for note in check_list("torch_reference", device=CPU, quick=True).notes if note.startswith("quick"))
    every, quick = (len(check_list("torch_reference", device=CPU, quick=quick).checks) for quick in (False, True))
    assert text.startswith(f"quick: leaves out {every - quick} cases, ") and " drawn from the claims" in text


@pytest.mark.parametrize("some", [("--quick",), ("--family", "builder"), ("--only", "contract.*")])
def test_strict_claims_need_every_check(some: tuple[str, ...], run: Callable[..., Result]) -> None:
    result = run("torch_reference", "--device", "cpu", "--strict-claims", *some)
    assert result.exit_code == 2 and "--strict-claims needs all checks" in result.output


@pytest.mark.parametrize(("strict", "status"), [((), 0), (("--strict-claims",), 1)])
def test_unproven_claim_fails_only_if_strict(
    strict: tuple[str, ...], status: int, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ["contract.*", "builder.build_leaves*", "numerics.*single]"]
    found = check_list("torch_reference", device=CPU, checks=wanted)
    passed = msgspec.structs.replace(found.report, results=tuple(map(pass_, found.report.results)))
    monkeypatch.setattr(CheckRun, "of", lambda self, name, **how: passed)
    assert run("torch_reference", "--device", "cpu", *strict).exit_code == status


def test_lost_claim_is_noted_under_summary(plug_in: Callable[..., None], run: Callable[..., Result]) -> None:
    plug_in("silent", Silent)
    result = run("silent", *QUICK)

    summary, note = result.output.splitlines()[-2:]
    assert result.exit_code == 0 and summary.startswith("silent: 1 checks = 1 pass")
    assert note.strip().startswith("advance is REBUILD: LosesItsClaim overrides build() but inherits advance;")


OURS, ITS = (".".join(map(str, version)) for version in (CONTRACT_VERSION, Ahead.contract_version))


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (Foreseen, "advance is PREPLANNED: its ranges are made on the host;"),
        (Ahead, f"built for contract {ITS}, but this library has {OURS}:"),
    ],
)
def test_lower_claim_or_newer_contract_is_noted(backend: type[AttentionBackend], expected: str) -> None:
    (note,) = notes(backend())
    assert note.startswith(expected)


def test_verbose_lists_unsupported_checks(plug_in: Callable[..., None], run: Callable[..., Result]) -> None:
    plug_in("silent", Silent)
    words = ("silent", "--device", "cpu", "--only", "builder.advance_keeps_addresses*")
    line = "unsupported: builder.advance_keeps_addresses[base-decode]: advance is REBUILD: LosesItsClaim overrides"

    assert line in run(*words, "--verbose").output
    assert "unsupported: " not in run(*words).output


@pytest.mark.parametrize(("backend", "outcome"), [(MisnamedBefore, Outcome.PREVIEW), (Misnamed, Outcome.FAIL)])
def test_unregistered_name_is_reported_with_both_names(
    backend: type[AttentionBackend], outcome: Outcome, plug_in: Callable[..., None]
) -> None:
    plug_in("registered_as", backend)
    (result,) = check_backend(
        "registered_as", device=CPU, checks=["contract.name_is_the_registered_one"], report=True
    ).results

    assert result.outcome is outcome
    assert f"expected: name = 'registered_as' in {backend.__name__}" in result.reason
    assert result.reason.endswith("got: 'another_name'")


def test_backend_loaded_by_package_has_registered_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registered, "a-package:another_name", registry._Registration(Misnamed))
    monkeypatch.setattr(registry, "_loaded", {})
    report = check_backend(
        "a-package:another_name", device=CPU, checks=["contract.name_is_the_registered_one"], report=True
    )

    assert [result.outcome for result in report.results] == [Outcome.PASS]
