"""Run the checks of one backend and make its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest

import msgspec
import torch

from attn_backends import BrokenBackend, StateBackend, registry
from attn_backends.registry import Backend
from builders import AttentionSpec
from spec_decode.conformance.case_records import SpecRecord, records_of
from spec_decode.conformance.check import BOTH, AnySubject, Check, expand
from spec_decode.conformance.claims import claims_of
from spec_decode.conformance.coverage import EVERYTHING, FAMILIES
from spec_decode.conformance.drawn_cases import drawn
from spec_decode.conformance.kept_results import KeptResults
from spec_decode.conformance.known_failures import KnownFailure, known_failures_of
from spec_decode.conformance.notes import coverage_notes, notes_on, quick_note
from spec_decode.conformance.report import LOADING, DrawnRecord, Report, Result
from spec_decode.environment import Environment, environment
from spec_decode.source_digests import SourceRecord
from spec_decode.testing.error_location import error_location
from spec_decode.testing.outcome import CheckFailure, Measurements, Outcome, Unavailable, Unsupported
from spec_decode.testing.specs_run import specs_run
from spec_decode.testing.state_subject import StateSubject
from spec_decode.testing.subject import Subject


@dataclass(frozen=True, slots=True)
class CheckList:
    """What is about to run: a report whose results are all `not_run`, and the check for each of them.

    A backend that does not load has no checks, and one result with the reason. notes: see `notes_on`.
    """

    report: Report
    checks: tuple[Check, ...]
    known_failures: tuple[KnownFailure, ...] = ()
    notes: tuple[str, ...] = ()
    every: bool = False
    """Whether these are all checks of the backend, except those on request."""


def default_device() -> torch.device:
    """Return CUDA if available, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def iter_checks(
    backend: str | Backend,
    *,
    device: torch.device | None = None,
    families: Sequence[str] | None = None,
    quick: bool = False,
) -> list[Check]:
    """Return every check on every case for the backend.

    families: only these; soak, which takes minutes, runs only if named. quick: only the cases that each check marks for
    a quick run. Raises ValueError for an unknown family.
    """
    _require_families(families)
    every = expand(_subject(backend, device), families or (), families or FAMILIES)
    return [check for check in every if check.quick >= quick]


def check_backend(
    backend: str | Backend,
    *,
    device: torch.device | None = None,
    families: Sequence[str] | None = None,
    checks: Sequence[str] | None = None,
    tags: Sequence[str] | None = None,
    known_failures: Sequence[KnownFailure] | None = None,
    report: bool = False,
    on_note: Callable[[str], None] | None = None,
) -> Report:
    """Run the checks and return their report. Raises ConformanceFailure, listing the failures, unless it is ok.

    report: return the report even if it is not ok. families: run only these. checks: only ids that match one of these
    patterns. soak, a family that takes minutes, runs only if one of the two names it, for the length set by
    `soak_checks.soak_length`. tags: only checks that cover a column matching one of these. known_failures: None for
    those that ship with the backend. on_note: called before the first check with facts that no result states. A backend
    that does not load gives one `unavailable` result, which is not ok. Raises ValueError for an unknown family.
    """
    listed = check_list(
        backend, device=device, families=families, checks=checks, tags=tags, known_failures=known_failures
    )
    found = run(listed, on_note=on_note)
    if not report:
        found.raise_if_failed()
    return found


def run(
    listed: CheckList,
    *,
    on_result: Callable[[Result], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    kept: KeptResults | None = None,
) -> Report:
    """Run the checks of a list and return its report, filled in.

    on_note: also receives the coverage note after the last check. kept: saves each result as it arrives; results it
    already has are not run again. Raises ReportError if those belong to another run.
    """
    done = kept.begin(listed.report) if kept else {}
    tell = on_note or (lambda note: None)
    for note in listed.notes:
        tell(note)
    results = []
    for result, check in zip_longest(listed.report.results, listed.checks):
        outcome = done.get((result.check, result.case))
        if outcome is None:
            outcome = run_check(check, result, listed.known_failures) if check else result
            if kept:
                kept.add(outcome)
        results.append(outcome)
        if on_result:
            on_result(outcome)
    found = msgspec.structs.replace(listed.report, results=tuple(results))
    for note in coverage_notes(found, listed.checks, every=listed.every):
        tell(note)
    return found


def check_list(
    backend: str | Backend | AnySubject,
    *,
    device: torch.device | None = None,
    families: Sequence[str] | None = None,
    checks: Sequence[str] | None = None,
    tags: Sequence[str] | None = None,
    known_failures: Sequence[KnownFailure] | None = None,
    quick: bool = False,
    command: str = "",
) -> CheckList:
    """Return the checks that `check_backend` would run, and the report to fill in.

    backend: its name, the backend, or a whole subject, which has a device. quick: only the cases that each check marks
    for a quick run. command: how to run them all again. Raises ValueError for an unknown family, and for a text in
    place of a list or a device.
    """
    _require_families(families)
    _require_lists(checks=checks, tags=tags)
    if device is not None and not isinstance(device, torch.device):
        raise ValueError(f"device must be a torch.device, got {device!r:.200}. Pass torch.device({device!r:.200}).")
    device = backend.device if isinstance(backend, BOTH) else device or default_device()
    name = backend if isinstance(backend, str) else _backend_of(backend).name
    try:
        # Before anything that can initialise CUDA, so that a backend that does so while loading is noticed.
        subject = _subject(backend, device)
        known = known_failures_of(subject.backend) if known_failures is None else tuple(known_failures)
    except BrokenBackend as error:
        return CheckList(unloaded(name, environment(device), command, Outcome.UNAVAILABLE, str(error)), ())
    every = expand(subject, {*(families or ()), *(pattern.partition(".")[0] for pattern in checks or ())})
    families = families or subject.families
    wanted = [check for check in every if check.quick >= quick and _wanted(check, families, checks, tags)]
    report = Report(
        backend=name,
        env=environment(device),
        command=command,
        sources=_sources(subject, every),
        version=str(subject.backend.version),
        package=_package_of(name),
        engine=subject.engine,
        contract=".".join(map(str, subject.backend.contract_version)),
        claims=claims_of(subject, [column for check in every for column in check.covers]),
        drawn=_drawn(subject) if isinstance(subject, Subject) else None,
        results=tuple(map(_not_run, wanted)),
    )
    notes = notes_on(subject, report.claims, every, known)
    if quick:
        notes += (quick_note([check for check in every if not check.quick and _wanted(check, families, checks, tags)]),)
    return CheckList(report, tuple(wanted), known, notes, every=len(wanted) == len(every))


def run_check(check: Check, blank: Result, known_failures: Sequence[KnownFailure] = ()) -> Result:
    """Run a check and fill in its result. Any exception other than a check's own is an error of the backend."""
    start = time.perf_counter()
    evidence: Measurements = {}
    reason = ""
    ran: set[AttentionSpec] = set()
    try:
        with torch.no_grad(), specs_run() as ran:
            evidence = check()
        outcome = Outcome.PASS
    except CheckFailure as failure:
        outcome, reason = Outcome.FAIL, str(failure)
    except Unsupported as refusal:
        outcome, reason = Outcome.UNSUPPORTED, str(refusal)
    except Unavailable as missing:
        outcome, reason = Outcome.UNAVAILABLE, str(missing)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a backend can fail in any way; one check must not end the run
        outcome, reason = Outcome.ERROR, f"{type(error).__name__}: {error}{error_location(error)}"
    known = next((entry for entry in known_failures if entry.covers(check)), None)
    if known and (outcome is Outcome.FAIL or (known.error and outcome is Outcome.ERROR)):
        outcome, reason = Outcome.XFAIL, f"{known.issue}: {known.reason} ({reason})"
    elif known and not known.can_pass and outcome is Outcome.PASS:
        outcome, reason = Outcome.XPASS, f"{known.issue} says this fails, but it passes: remove the entry"
    elif check.preview and outcome in (Outcome.FAIL, Outcome.ERROR):
        outcome, reason = Outcome.PREVIEW, f"{check.preview}: {reason}"
    if blank.spec is None and len(ran) == 1:
        blank = msgspec.structs.replace(blank, spec=SpecRecord.of(*ran))
    # Digits after the fourth are noise, and would make up most of the report.
    evidence = {what: float(f"{value:.4g}") for what, value in evidence.items()}
    seconds = round(time.perf_counter() - start, 3)
    return msgspec.structs.replace(blank, outcome=outcome, reason=reason, evidence=evidence, seconds=seconds)


def unloaded(name: str, env: Environment, command: str, outcome: Outcome, reason: str = "") -> Report:
    """Return the report of a backend that did not load; its one result gives the reason, in every column."""
    loading = Result(check=LOADING, case="any", outcome=outcome, reason=reason, tags=(EVERYTHING,))
    return Report(backend=name, version="unknown", env=env, command=command, results=(loading,))


def _drawn(subject: Subject) -> DrawnRecord | None:
    """Record the draws; None if the checks have none. Checks that cannot draw say why themselves."""
    try:
        found = drawn(subject)
    except KeyboardInterrupt:
        raise
    except BaseException:  # Unsupported, or any error from a plug-in's record
        return None
    if not found.cases:
        return None
    return DrawnRecord(
        seed=found.seed, cases=len(found.cases), pairs=found.covered, possible=found.possible, missed=found.missed
    )


def _sources(subject: AnySubject, checks: Sequence[Check]) -> SourceRecord:
    """Record the modules behind each family's checks and behind the backend."""
    backend = (type(subject.backend).__module__, subject.backend.builder.__module__)
    families: dict[str, set[str]] = {}
    for check in checks:
        families.setdefault(check.family, set(backend)).add(check.module)
    return SourceRecord.of(families)


def _package_of(name: str) -> str:
    """Return the package that declares a backend, with its version; empty if built in or registered by a call."""
    packages = {plug_in.name: plug_in.package for plug_in in registry.plug_ins()}
    if name not in packages or registry.registered_here(name):
        return ""
    with suppress(PackageNotFoundError):
        return f"{packages[name]} {version(packages[name])}"
    return packages[name]


def _not_run(check: Check) -> Result:
    spec, batch = records_of(check.value)
    return Result(check=check.name, case=check.case, outcome=Outcome.NOT_RUN, tags=check.covers, spec=spec, batch=batch)


def _backend_of(backend: Backend | AnySubject) -> Backend:
    return backend.backend if isinstance(backend, BOTH) else backend


def _subject(backend: str | Backend | AnySubject, device: torch.device | None) -> AnySubject:
    if isinstance(backend, BOTH):
        return backend
    device = device or default_device()
    own, name = (registry.load(backend), backend) if isinstance(backend, str) else (backend, "")
    return StateSubject(own, device, name) if isinstance(own, StateBackend) else Subject(own, device, name)


def _require_lists(**named: Sequence[str] | None) -> None:
    """Raise ValueError for a text, whose characters would be taken for patterns."""
    for name, given in named.items():
        if isinstance(given, str):
            raise ValueError(f"{name} must be a list of texts, got the text {given!r:.200}. Pass [{given!r:.200}].")


def _require_families(families: Sequence[str] | None) -> None:
    if unknown := sorted({*(families or ())} - {*FAMILIES}):
        raise ValueError(f"families must be among {', '.join(FAMILIES)}, got {', '.join(map(repr, unknown))}")


def _wanted(
    check: Check, families: Sequence[str] | None, checks: Sequence[str] | None, tags: Sequence[str] | None
) -> bool:
    if families and check.family not in families:
        return False
    if tags and not any(fnmatch(column, pattern) for column in check.covers for pattern in tags):
        return False
    return not checks or any(fnmatch(check.id, pattern) or fnmatch(check.name, pattern) for pattern in checks)
