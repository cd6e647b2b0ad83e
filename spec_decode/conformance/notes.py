"""Notes for the person running the checks: facts that no result states and that are neither a pass nor a failure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from builders import CONTRACT_VERSION, AdvanceLevel
from spec_decode.conformance.check import AnySubject, Check
from spec_decode.conformance.claims import level_words
from spec_decode.conformance.coverage import ADVANCE
from spec_decode.conformance.known_failures import KnownFailure
from spec_decode.conformance.report import Claim, DrawnRecord, Report
from spec_decode.testing.batches import Case
from spec_decode.testing.outcome import Outcome

_NOT_TESTED = {Outcome.UNSUPPORTED, Outcome.UNAVAILABLE, Outcome.NOT_RUN}
_SHOWN = 12
"""Maximum number of untried claimed columns to list."""


def notes_on(
    subject: AnySubject, claims: Mapping[str, Claim], checks: Sequence[Check], known_failures: Sequence[KnownFailure]
) -> tuple[str, ...]:
    """Report an untried advance, known failures that cover nothing, and a contract newer than this library's."""
    return (*_advance(claims), *_unused(subject, checks, known_failures), *_version(subject))


def coverage_notes(report: Report, checks: Sequence[Check], *, every: bool) -> Iterator[str]:
    """Describe what no passed check covered of the claims, and the sizes that were tried.

    report: the finished one of these checks. every: whether they are all checks of the backend; else only the claims
    that these checks could have covered count.
    """
    could = {column for check in checks for column in check.covers}
    missed = [column for column in report.unverified if every or column in could]
    if missed:
        yield (
            f"claimed, but no passed check has them: {_first(missed)}. --verbose shows why their cases did not run; "
            "claim only what the backend serves"
        )
    ran = {(result.check, result.case) for result in report.results if result.outcome not in _NOT_TESTED}
    cases = [check.value for check in checks if isinstance(check.value, Case) and (check.name, check.case) in ran]
    if cases:
        yield f"tried: {', '.join(f'{axis} {found}' for axis, found in _tried(cases).items())}"
    if report.drawn and every:
        yield from _drawn(report.drawn)


_DRAWN = "spec_decode.conformance.drawn_checks"


def _first(names: Sequence[str]) -> str:
    """List the first names, and how many more there are."""
    more = [f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return ", ".join([*names[:_SHOWN], *more])


def _tried(cases: Sequence[Case]) -> dict[str, str]:
    """Return the sizes of these cases by axis: all of a few, else how many from the smallest to the largest."""
    values: dict[str, set[int]] = {
        "heads": {case.spec.num_q_heads for case in cases},
        "KV heads": {case.spec.num_kv_heads for case in cases},
        "groups": {case.spec.group_size for case in cases},
        "dims": {case.spec.head_dim for case in cases},
        "pages": {case.spec.page_size for case in cases},
        "windows": {case.spec.sliding_window for case in cases if case.spec.sliding_window is not None},
        "rows": {len(case.batch.seq_lens) for case in cases},
        "query tokens": {tokens for case in cases for tokens in case.batch.query_lens},
        "lengths": {length for case in cases for length in case.batch.seq_lens},
    }
    return {axis: _sizes(sorted(found)) for axis, found in values.items() if found}


def _sizes(found: Sequence[int]) -> str:
    if len(found) <= 3:
        return "/".join(map(str, found))
    return f"{found[0]} to {found[-1]:,} ({len(found)} sizes)"


def _drawn(drawn: DrawnRecord) -> Iterator[str]:
    yield (
        f"drawn: {drawn.cases} cases from seed {drawn.seed}, with {drawn.pairs:,} of {drawn.possible:,} pairs of "
        "classes of claimed values; --seed draws others"
    )
    if drawn.missed:
        classes = _first([f"{axis} {label}" for axis, label in drawn.missed])
        yield f"in no drawn case, because it is refused or costs too much: {classes}"


def quick_note(left_out: Sequence[Check]) -> str:
    """Say what a quick run leaves out."""
    drawn = sum(check.module == _DRAWN for check in left_out)
    return (
        f"quick: leaves out {len(left_out)} cases, {drawn} of them drawn from the claims. A fault of one size or of "
        "one combination mostly shows only there: run them all before you rely on the backend"
    )


def _advance(claims: Mapping[str, Claim]) -> Iterator[str]:
    claim = claims.get(ADVANCE)
    if claim is not None and claim.level not in ("", level_words(AdvanceLevel.IN_GRAPH)):
        yield f"advance is {claim.level.upper()}: {claim.reason}; in-graph advance was not tested"


def _unused(subject: AnySubject, checks: Sequence[Check], known_failures: Sequence[KnownFailure]) -> Iterator[str]:
    # A note, not a failure: the entry can be meant for another backend of the module, or for another device's cases.
    for entry in known_failures:
        if not any(entry.may_cover(check) for check in checks):
            yield (
                f"known failure {entry.check}[{entry.case}] ({entry.issue}) covers no check of {subject.backend.name} "
                f"on {subject.device.type}: correct its names, or remove it if no backend of its module needs it"
            )


def _version(subject: AnySubject) -> Iterator[str]:
    if subject.backend.contract_version > CONTRACT_VERSION:
        built_for, own = (".".join(map(str, v)) for v in (subject.backend.contract_version, CONTRACT_VERSION))
        yield (
            f"built for contract {built_for}, but this library has {own}: newer rules are unknown here and were not "
            "tested; install a later attn-backends for them"
        )
