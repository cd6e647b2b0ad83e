"""A check newer than the contract that a backend was built for is a preview: it breaks no working plug-in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _pytest.outcomes import XFailed

from attn_backends import AttentionBackend
from attn_backends.torch_reference import TorchReference
from builders import CONTRACT_VERSION
from spec_decode.conformance import KnownFailure, check_backend, parametrize_with_checks
from spec_decode.conformance import check as kit
from spec_decode.conformance.coverage import with_case
from spec_decode.conformance.parametrize import _for_pytest
from spec_decode.conformance.report import Report
from spec_decode.testing.outcome import Outcome, expect
from spec_decode.testing.subject import Subject

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def new_checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kit of version 1.1, with one check that fails, one that crashes and one that passes."""
    monkeypatch.setattr(kit, "_definitions", [])
    check = kit.Family("builder", covers=with_case())

    @check("a new rule", since=(1, 1))
    def fails(subject: Subject, case: None) -> None:
        expect(False, contract="a new rule", expected="that", got="this")

    @check("a new rule", since=(1, 1))
    def crashes(subject: Subject, case: None) -> None:
        raise KeyError("gone")

    @check("a new rule", since=(1, 1))
    def passes(subject: Subject, case: None) -> None: ...

    yield


class Before(TorchReference):
    contract_version = (1, 0)


class Since(TorchReference):
    contract_version = (1, 1)


def outcomes(report: Report) -> dict[str, Outcome]:
    return {result.check: result.outcome for result in report.results}


def pytest_face(backend: AttentionBackend, name: str) -> Callable[[], None]:
    """What pytest runs for the check of that name."""
    mark: Any = parametrize_with_checks(backend, device=CPU)
    (run,) = (param.values[0] for param in mark.args[1] if name in param.id)
    return run  # type: ignore[no-any-return]


def three(fails: Outcome, crashes: Outcome, passes: Outcome = Outcome.PASS) -> dict[str, Outcome]:
    return {"builder.fails": fails, "builder.crashes": crashes, "builder.passes": passes}


def test_newer_checks_are_previews_for_older_backend() -> None:
    """A backend built for the check's contract version fails it."""
    report = check_backend(Before(), device=CPU, report=True)

    assert report.ok and outcomes(report) == three(Outcome.PREVIEW, Outcome.PREVIEW)
    assert report.results[0].reason.startswith(
        "new in contract 1.1, the backend was built for 1.0: contract: a new rule"
    )
    assert outcomes(Report.of(report.document(), "here")) == outcomes(report)
    report = check_backend(Since(), device=CPU, report=True)
    assert not report.ok and outcomes(report) == three(Outcome.FAIL, Outcome.ERROR)


def test_previews_alone_prove_nothing() -> None:
    assert not check_backend(Before(), device=CPU, checks=["builder.fails"], report=True).ok


def test_known_failure_takes_precedence_over_preview() -> None:
    known = [KnownFailure(check="builder.*", reason="later", issue="#9", error=True)]
    report = check_backend(Before(), device=CPU, known_failures=known, report=True)

    assert outcomes(report) == three(Outcome.XFAIL, Outcome.XFAIL, Outcome.XPASS)


NEW = r"new in contract 1\.1, the backend was built for 1\.0"


@pytest.mark.parametrize(
    ("backend", "name", "error", "words"),
    [
        (Before, "builder.fails", XFailed, NEW),
        (Before, "builder.crashes", XFailed, NEW),
        (Since, "builder.fails", pytest.fail.Exception, "a new rule"),
        (Since, "builder.crashes", KeyError, "gone"),
    ],
)
def test_pytest_marks_failing_preview_xfail(
    backend: type[AttentionBackend], name: str, error: type[BaseException], words: str
) -> None:
    run = pytest_face(backend(), name)
    with pytest.raises(error, match=words):
        run()


def test_pytest_runs_check_on_one_thread() -> None:
    seen: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        _for_pytest(lambda: seen.append(torch.get_num_threads()), "")()  # type: ignore[arg-type]
        assert seen == [1] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_backend_without_contract_version_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    silent = type("Silent", (AttentionBackend,), {k: v for k, v in vars(TorchReference).items() if k in _OF_A_BACKEND})
    report = check_backend(silent(), device=CPU, checks=["contract.version_matches"], report=True)

    assert [result.outcome for result in report.results] == [Outcome.FAIL]
    assert f"contract_version = {CONTRACT_VERSION} in Silent" in report.results[0].reason


_OF_A_BACKEND = ("name", "version", "builder", "capabilities", "forward")
