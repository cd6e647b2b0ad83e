"""Failures known to a backend's author, from a call or from a file next to the backend."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from attn_backends import AttentionBackend, BrokenBackend, get, registry
from attn_backends.torch_reference import TorchReference
from spec_decode.cli.main import main
from spec_decode.conformance import KnownFailure, check_backend, parametrize_with_checks
from spec_decode.conformance.known_failures import known_failures_of
from spec_decode.conformance.report import Report
from spec_decode.testing.outcome import Outcome
from tests.factories import register_as

CPU = torch.device("cpu")
VERSION, INERT = "contract.version_matches", "builder.padding_stays_inert"
_MODULE = """
from attn_backends.torch_reference import TorchReference

class Crashes(TorchReference):
    name = "crashes"

    def forward(self, *args, **kwargs):
        raise RuntimeError("no kernel image")
"""


@pytest.fixture
def crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    """A third party's backend, in a module of its own folder; registered until the test ends."""
    (tmp_path / "crashing_backend.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "crashing_backend", raising=False)
    from crashing_backend import Crashes  # type: ignore[import-not-found]

    for store in ("_registered", "_loaded"):
        monkeypatch.setattr(registry, store, dict(getattr(registry, store)))
    register_as("crashes", Crashes)
    backend: AttentionBackend = Crashes()
    return backend


@pytest.fixture
def beside(tmp_path: Path) -> Callable[[str], object]:
    """Writes the file beside the backend."""
    return (tmp_path / "known_failures.toml").write_text


def report_of(backend: AttentionBackend | str, *checks: str, known: list[KnownFailure] | None = None) -> Report:
    return check_backend(backend, device=CPU, checks=checks, known_failures=known, report=True)


def outcomes(report: Report) -> dict[str, Outcome]:
    return {result.case: result.outcome for result in report.results}


def run_check() -> Result:
    return CliRunner().invoke(main, ["check", "crashes", "--device", "cpu", "--only", VERSION])


@pytest.mark.parametrize(("error", "outcome"), [(True, Outcome.XFAIL), (False, Outcome.ERROR)])
def test_known_exception_is_xfail_only_if_declared(crashes: AttentionBackend, error: bool, outcome: Outcome) -> None:
    """It may be of another bug than the failure that is known."""
    known = [KnownFailure(check="numerics.attention_*", reason="kernel missing", issue="#7", error=error)]
    (result,) = report_of(crashes, "numerics.attention_is_right[[]base-single]", known=known).results
    assert result.outcome is outcome and ("#7: kernel missing" in result.reason) is error
    assert "RuntimeError: no kernel image (in forward, crashing_backend.py:8)" in result.reason


def test_known_failure_that_passes_is_a_failure() -> None:
    report = report_of("torch_reference", VERSION, known=[KnownFailure(check=VERSION, reason="old", issue="#8")])
    assert [result.outcome for result in report.results] == [Outcome.XPASS] and not report.ok


def test_known_column_failure_covers_passing_drawn_cases() -> None:
    def wrong(self: Any, *inputs: Any, spec: Any, **options: Any) -> torch.Tensor:
        out = TorchReference.forward(self, *inputs, spec=spec, **options)
        return out + 1 if spec.soft_cap == 2.0 else out

    backend = type("Capped", (TorchReference,), {"forward": wrong})()
    known = [KnownFailure(check="*.drawn_*", column="feature:soft_cap", reason="later", issue="#9")]
    report = report_of(backend, "numerics.drawn_attention_is_right[[]s0-00*", known=known)
    found = {result.outcome for result in report.results if "feature:soft_cap" in result.tags}
    assert found == {Outcome.XFAIL, Outcome.PASS} and report.ok
    assert {result.outcome for result in report.results if "feature:soft_cap" not in result.tags} == {Outcome.PASS}


def test_known_failures_file_marks_failures_expected(
    crashes: AttentionBackend, beside: Callable[[str], object]
) -> None:
    assert known_failures_of(crashes) == known_failures_of(get("torch_reference")) == ()
    beside('[[known_failure]]\ncheck = "numerics.*"\ncase = "base-*"\nreason = "no"\nissue = "#7"\nerror = true\n')
    report = report_of(crashes, *(f"numerics.attention*[[]{case}]" for case in ("scale-decode", "base-decode")))
    assert outcomes(report) == {"base-decode": Outcome.XFAIL, "scale-decode": Outcome.ERROR}


@pytest.mark.parametrize(("column", "strict"), [("", True), ("feature:soft_cap", False)])
def test_known_failure_of_column_may_pass_in_pytest(
    column: str, strict: bool, crashes: AttentionBackend, beside: Callable[[str], object]
) -> None:
    """As in the kit's own report: of the cases with a column, some can pass."""
    beside(f'[[known_failure]]\ncheck = "*.drawn_*"\ncolumn = "{column}"\nreason = "no"\nissue = "#7"\n')
    params = parametrize_with_checks(crashes, device=CPU, families=["numerics"]).args[1]
    marks = [mark for param in params for mark in param.marks if mark.name == "xfail"]
    assert marks and {mark.kwargs["strict"] for mark in marks} == {strict}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[[known_failure]]\ncheck = "a.b"\nreason = "later"\n', "missing required field `issue`"),
        ('[[known_failure]]\ncheck = "a.b"\nreason = "later"\nissue = ""\n', "needs a reason and an issue"),
        ('[[known_failure]]\ncheck = "a.b"\ncases = "x"\nreason = "r"\nissue = "#7"\n', "unknown field `cases`"),
        ('[[known_failures]]\ncheck = "a.b"\n', "unknown field `known_failures`"),
        ("[[known_failure", "must hold tables"),
        ("# caf\udce9", "can't decode byte 0xe9"),
        ("a = " + "[" * 100_000, "must hold tables"),
    ],
)
def test_invalid_known_failures_file_makes_backend_unavailable(
    crashes: AttentionBackend, tmp_path: Path, text: str, says: str
) -> None:
    (tmp_path / "known_failures.toml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(BrokenBackend, match=rf"known_failures\.toml.*{says}|{says}.*known_failures\.toml"):
        known_failures_of(crashes)
    report = report_of(crashes)
    assert [result.outcome for result in report.results] == [Outcome.UNAVAILABLE] and not report.ok
    printed = run_check()
    assert (
        printed.exit_code == 1
        and f"unavailable: contract.loads[any]: {tmp_path}/known_failures.toml must hold tables" in printed.output
    )


def notes(backend: AttentionBackend | str, pattern: str, entry: KnownFailure) -> list[str]:
    texts: list[str] = []
    check_backend(backend, device=CPU, checks=[pattern], known_failures=[entry], on_note=texts.append, report=True)
    return texts


def later(**fields: str) -> KnownFailure:
    return KnownFailure(**{"check": INERT, "case": "base-*", **fields}, reason="later", issue="#7")


@pytest.mark.parametrize("entry", [later(check=f"{INERT}_", case="*"), later(case="bse-*")])
def test_known_failure_covering_nothing_is_noted(entry: KnownFailure) -> None:
    (note,) = notes("torch_reference", VERSION, entry)
    expected = f"known failure {entry.check}[{entry.case}] (#7) covers no check of torch_reference on cpu:"
    assert note.startswith(expected)


def test_unused_file_entry_is_noted_under_summary(crashes: AttentionBackend, beside: Callable[[str], object]) -> None:
    beside('[[known_failure]]\ncheck = "builder.padding_stays_inrt"\nreason = "later"\nissue = "#7"\n')
    output = run_check().output
    assert "known failure builder.padding_stays_inrt[*] (#7) covers no check" in output


REFUSING: Any = {"unsupported_reasons": lambda self, spec, device: ["not here"]}


@pytest.mark.parametrize("backend", ["torch_reference", type("Refusing", (TorchReference,), REFUSING)()])
def test_entry_for_unselected_check_is_not_noted(
    backend: AttentionBackend | str,
) -> None:
    assert notes(backend, VERSION, later()) == []
