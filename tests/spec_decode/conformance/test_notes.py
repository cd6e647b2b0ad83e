"""What a run says beside its verdicts: an advance nobody tried, an entry that covers nothing, a name of another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner, Result

from attn_backends import AttentionBackend, registry
from attn_backends.torch_reference import TorchReference
from builders import CONTRACT_VERSION, AttentionBatch, ReferenceBuilder, ReferenceMetadata
from spec_decode.cli.main import main
from spec_decode.conformance import KnownFailure, check_backend
from spec_decode.conformance.notes import tried as what_was_tried
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


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[AttentionBackend]:
    """A third party's backend `foldered`, beside whose module a test may write."""
    module = "from attn_backends.torch_reference import TorchReference\n\n\n"
    (tmp_path / "foldered_backend.py").write_text(f'{module}class Foldered(TorchReference):\n    name = "foldered"\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "foldered_backend", raising=False)
    from foldered_backend import Foldered  # type: ignore[import-not-found]

    backend: type[AttentionBackend] = Foldered
    return backend


def notes(backend: str | AttentionBackend, *checks: str, known: list[KnownFailure] | None = None) -> list[str]:
    """What was told, but for what was tried, which is told last."""
    told: list[str] = []
    only = checks or ("contract.version_matches",)
    check_backend(backend, device=CPU, checks=only, known_failures=known, on_note=told.append, report=True)
    return told[:-1]


def tried(*checks: str) -> str:
    told: list[str] = []
    check_backend("torch_reference", device=CPU, checks=checks, on_note=told.append, report=True)
    return told[-1]


def test_a_run_tells_which_claims_it_did_not_try_and_how_large_its_batches_were() -> None:
    told = tried("numerics.attention_is_right[[]base-single]", "numerics.attention_is_right[[]sinks-decode]")
    assert told.startswith("claimed and never tried: contract:declared, contract:memory, contract:refusals, dim:128")
    assert "feature:sinks" not in told and "mode:decode" not in told and " more; " in told
    assert told.endswith(f"rows up to {len(DECODE.seq_lens)}, lengths up to {max(DECODE.seq_lens)}")


def test_a_claim_counts_as_never_tried_where_it_was_refused_and_not_where_it_is_not_made() -> None:
    planned = plan("torch_reference", device=CPU, checks=["numerics.attention_is_right[[]sinks-decode]"])
    results = [msgspec.structs.replace(result, outcome=Outcome.UNSUPPORTED) for result in planned.report.results]
    refused = what_was_tried({"feature:sinks": Claim(claimed=True)}, planned.checks, results)
    assert refused == "claimed and never tried: feature:sinks; rows up to 0, lengths up to 0"
    told = what_was_tried({"feature:sinks": Claim(claimed=False)}, planned.checks, planned.report.results)
    assert told.startswith("claimed and never tried: nothing;")


def test_what_was_tried_and_nothing_else_is_told_under_the_summary_also_from_a_subprocess(
    run: Callable[..., Result],
) -> None:
    here, isolated = (
        run("torch_reference", *QUICK, *options).output.splitlines() for options in (["--no-isolate"], [])
    )
    assert here[-1].strip().startswith("claimed and never tried: ") and here[-1] == isolated[-1]
    assert all(lines[-2].startswith("torch_reference: 1 checks") for lines in (here, isolated))
    assert notes("torch_reference") == []


def test_a_claim_that_was_lost_is_told_under_the_summary(
    plug_in: Callable[..., None], run: Callable[..., Result]
) -> None:
    plug_in("silent", Silent)
    result = run("silent", *QUICK)

    summary, note, _ = result.output.splitlines()[-3:]
    assert result.exit_code == 0 and summary.startswith("silent: 1 checks = 1 pass")
    assert note.strip().startswith("advance is REBUILD: LosesItsClaim overrides build() and inherits its advance;")


def test_a_weaker_claim_is_told_with_its_reason() -> None:
    (note,) = notes(Foreseen())

    assert note.startswith("advance is PREPLANNED: its ranges are made on the host;")


def test_a_contract_from_the_future_is_told_with_both_versions() -> None:
    (note,) = notes(Ahead())

    ours, its = (".".join(map(str, version)) for version in (CONTRACT_VERSION, Ahead.contract_version))
    assert note.startswith(f"built for contract {its}, this library has {ours}:")


@pytest.mark.parametrize(
    ("check", "case"), [("builder.padding_stays_inrt", "*"), ("builder.padding_stays_inert", "bse-*")]
)
def test_a_known_failure_that_covers_nothing_is_told(check: str, case: str) -> None:
    (note,) = notes("torch_reference", known=[KnownFailure(check=check, case=case, reason="later", issue="#7")])

    assert note.startswith(f"known failure {check}[{case}] (#7) covers no check of torch_reference on cpu:")


def test_a_known_failure_whose_check_was_not_asked_for_is_none_that_covers_nothing() -> None:
    known = [KnownFailure(check="builder.padding_stays_inert", case="base-*", reason="later", issue="#7")]

    assert notes("torch_reference", "contract.version_matches", known=known) == []


def test_a_backend_that_serves_nothing_here_has_no_case_names_to_miss() -> None:
    refusing = type("Refusing", (TorchReference,), {"unsupported_reasons": lambda self, spec, device: ["not here"]})
    known = [KnownFailure(check="builder.padding_stays_inert", case="base-*", reason="later", issue="#7")]

    assert notes(refusing(), known=known) == []


def test_an_entry_of_the_file_that_covers_nothing_is_told_under_the_summary(
    in_a_folder: type[AttentionBackend], plug_in: Callable[..., None], run: Callable[..., Result], tmp_path: Path
) -> None:
    entry = '[[known_failure]]\ncheck = "builder.padding_stays_inrt"\nreason = "later"\nissue = "#7"\n'
    (tmp_path / "known_failures.toml").write_text(entry)
    plug_in("foldered", in_a_folder)

    assert "known failure builder.padding_stays_inrt[*] (#7) covers no check" in run("foldered", *QUICK).output


def test_why_a_backend_is_unavailable_is_told(
    in_a_folder: type[AttentionBackend], plug_in: Callable[..., None], run: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "known_failures.toml").write_text("[[known_failure]]")
    plug_in("foldered", in_a_folder)
    result = run("foldered", *QUICK)

    assert result.exit_code == 1
    assert "unavailable: contract.loads[any]: known failures are tables" in result.output


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
