"""Run the checks of one backend and make its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

import torch

from attn_backends import AttentionBackend, BrokenBackend, get
from spec_decode.conformance.check import Check, CheckFailure, Subject, Unavailable, Unsupported, expand
from spec_decode.report import Outcome, Report, Result, environment


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownFailure:
    """A check that is expected to fail. An issue is mandatory, and passing after all is a failure."""

    check: str
    reason: str
    issue: str
    case: str = "*"

    def __post_init__(self) -> None:
        if not self.issue or not self.reason:
            raise ValueError(
                f"a known failure needs a reason and an issue, {self.check} has {self.reason!r} and {self.issue!r}; "
                "an untracked waiver would stay for ever. Open an issue and name it."
            )

    def covers(self, check: Check) -> bool:
        return fnmatch(check.name, self.check) and fnmatch(check.case, self.case)


def default_device() -> torch.device:
    """CUDA where it is, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def iter_checks(backend: str | AttentionBackend, *, device: torch.device | None = None) -> list[Check]:
    """Every check on every case for the backend."""
    return expand(_subject(backend, device))


def check_backend(
    backend: str | AttentionBackend,
    *,
    device: torch.device | None = None,
    families: Sequence[str] | None = None,
    checks: Sequence[str] | None = None,
    known_failures: Sequence[KnownFailure] = (),
    on_result: Callable[[Result], None] | None = None,
    command: str = "",
) -> Report:
    """Run the checks and return the report; never raises for a check that fails.

    families, checks: run only these families, only check ids matching one of these patterns. A backend that does not
    load gives a report whose one result is `unavailable`, which is not ok.
    """
    device = device or default_device()
    name = backend if isinstance(backend, str) else backend.name
    results: list[Result] = []

    def record(result: Result) -> None:
        results.append(result)
        if on_result:
            on_result(result)

    version = "unknown"
    try:
        subject = _subject(backend, device)
    except BrokenBackend as error:
        record(
            Result(
                check="contract.loads",
                family="contract",
                case="any",
                outcome=Outcome.UNAVAILABLE,
                reason=str(error),
            )
        )
    else:
        version = str(subject.backend.version)
        for check in expand(subject):
            if _wanted(check, families, checks):
                record(run_check(check, name, device, known_failures))
    return Report(backend=name, version=version, env=environment(device), command=command, results=tuple(results))


def run_check(check: Check, backend: str, device: torch.device, known_failures: Sequence[KnownFailure] = ()) -> Result:
    """One check's result; an exception that is no verdict is an error."""
    start = time.perf_counter()
    evidence: dict[str, float] = {}
    reason = ""
    try:
        with torch.no_grad():
            evidence = check()
        outcome = Outcome.PASS
    except CheckFailure as failure:
        outcome, reason = Outcome.FAIL, str(failure)
    except Unsupported as refusal:
        outcome, reason = Outcome.UNSUPPORTED, str(refusal)
    except Unavailable as lack:
        outcome, reason = Outcome.UNAVAILABLE, str(lack)
    except Exception as error:  # a backend may fail in any way; one check's error must not end the run
        outcome, reason = Outcome.ERROR, f"{type(error).__name__}: {error}"
    known = next((entry for entry in known_failures if entry.covers(check)), None)
    if known and outcome in (Outcome.FAIL, Outcome.ERROR):
        outcome, reason = Outcome.XFAIL, f"{known.issue}: {known.reason} ({reason})"
    elif known and outcome is Outcome.PASS:
        outcome, reason = Outcome.XPASS, f"{known.issue} says this fails, and it passes: remove the entry"
    return Result(
        check=check.name,
        family=check.family,
        case=check.case,
        outcome=outcome,
        reason=reason,
        evidence=evidence,
        seconds=round(time.perf_counter() - start, 4),
        repro=f"attn-backends check {backend} --device {device.type} --only '{check.name}*{check.case}*'",
    )


def _subject(backend: str | AttentionBackend, device: torch.device | None) -> Subject:
    return Subject(get(backend) if isinstance(backend, str) else backend, device or default_device())


def _wanted(check: Check, families: Sequence[str] | None, checks: Sequence[str] | None) -> bool:
    if families and check.family not in families:
        return False
    return not checks or any(fnmatch(check.id, pattern) or fnmatch(check.name, pattern) for pattern in checks)
