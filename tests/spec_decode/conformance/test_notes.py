"""Notes that a run prints after its results: an advance below IN_GRAPH, untested claims, a backend of another name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch
from click.testing import CliRunner, Result

from attn_backends import AttentionBackend, registry
from attn_backends.torch_reference import TorchReference
from builders import CONTRACT_VERSION, AttentionBatch, ReferenceBuilder, ReferenceMetadata
from spec_decode.cli.main import main
from spec_decode.conformance import check_backend
from spec_decode.conformance.notes import coverage_note
from spec_decode.conformance.report import Claim
from spec_decode.conformance.runner import plan
from spec_decode.testing.batches import DECODE
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


def notes(backend: str | AttentionBackend, *checks: str) -> list[str]:
    told: list[str] = []
    only = checks or ("contract.version_matches",)
    check_backend(backend, device=CPU, checks=only, on_note=told.append, report=True)
    return told


def test_a_run_tells_which_claims_it_did_not_try_and_how_large_its_batches_were() -> None:
    cases = ("base-single", "sinks-decode")
    (told,) = notes("torch_reference", *(f"numerics.attention_is_right[[]{case}]" for case in cases))
    assert told.startswith("claimed but not tested: contract:declared, contract:memory, contract:refusals, dim:128")
    assert "feature:sinks" not in told and "mode:decode" not in told and " more; " in told
    assert told.endswith(f"rows up to {len(DECODE.seq_lens)}, lengths up to {max(DECODE.seq_lens)}")


def test_a_claim_counts_as_never_tried_where_it_was_refused_and_not_where_it_is_not_made() -> None:
    planned = plan("torch_reference", device=CPU, checks=["numerics.attention_is_right[[]sinks-decode]"])
    results = [msgspec.structs.replace(result, outcome=Outcome.UNSUPPORTED) for result in planned.report.results]
    refused = coverage_note({"feature:sinks": Claim(claimed=True)}, planned.checks, results)
    assert refused == "claimed but not tested: feature:sinks; rows up to 0, lengths up to 0"
    told = coverage_note({"feature:sinks": Claim(claimed=False)}, planned.checks, planned.report.results)
    assert told.startswith("claimed but not tested: nothing;")


def test_a_claim_that_was_lost_and_what_was_tried_are_told_under_the_summary(
    plug_in: Callable[..., None], run: Callable[..., Result]
) -> None:
    plug_in("silent", Silent)
    result = run("silent", *QUICK)

    summary, note, tried = result.output.splitlines()[-3:]
    assert result.exit_code == 0 and summary.startswith("silent: 1 checks = 1 pass")
    assert note.strip().startswith("advance is REBUILD: LosesItsClaim overrides build() but inherits advance;")
    assert tried.strip().startswith("claimed but not tested: ")


OURS, ITS = (".".join(map(str, version)) for version in (CONTRACT_VERSION, Ahead.contract_version))


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        (Foreseen, "advance is PREPLANNED: its ranges are made on the host;"),
        (Ahead, f"built for contract {ITS}, but this library has {OURS}:"),
    ],
)
def test_a_weaker_claim_and_a_contract_from_the_future_are_told(backend: type[AttentionBackend], told: str) -> None:
    note, _ = notes(backend())
    assert note.startswith(told)


def test_what_is_unsupported_is_listed_on_demand(plug_in: Callable[..., None], run: Callable[..., Result]) -> None:
    plug_in("silent", Silent)
    asked = ("silent", "--device", "cpu", "--only", "builder.advance_keeps_addresses*")
    line = "unsupported: builder.advance_keeps_addresses[base-decode]: advance is REBUILD: LosesItsClaim overrides"

    assert line in run(*asked, "--verbose").output
    assert "unsupported: " not in run(*asked).output


@pytest.mark.parametrize(("backend", "outcome"), [(MisnamedBefore, Outcome.PREVIEW), (Misnamed, Outcome.FAIL)])
def test_a_name_that_is_not_the_registered_one_is_told_with_both(
    backend: type[AttentionBackend], outcome: Outcome, plug_in: Callable[..., None]
) -> None:
    plug_in("registered_as", backend)
    (result,) = check_backend(
        "registered_as", device=CPU, checks=["contract.name_is_the_registered_one"], report=True
    ).results

    assert result.outcome is outcome
    assert f"expected: name = 'registered_as' in {backend.__name__}" in result.reason
    assert result.reason.endswith("got: 'another_name'")


def test_a_backend_asked_for_by_its_package_has_the_registered_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registered, "a-package:another_name", registry._Registration(Misnamed))
    monkeypatch.setattr(registry, "_loaded", {})
    report = check_backend(
        "a-package:another_name", device=CPU, checks=["contract.name_is_the_registered_one"], report=True
    )

    assert [result.outcome for result in report.results] == [Outcome.PASS]
