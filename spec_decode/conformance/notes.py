"""Notes for the person running the checks: facts that no result states and that are neither a pass nor a failure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from builders import CONTRACT_VERSION, AdvanceLevel
from spec_decode.conformance.check import Check
from spec_decode.conformance.claims import level_words
from spec_decode.conformance.coverage import ADVANCE
from spec_decode.conformance.known_failures import KnownFailure
from spec_decode.conformance.report import Claim, Result
from spec_decode.testing.batches import Case
from spec_decode.testing.outcome import Outcome
from spec_decode.testing.subject import Subject

_NOT_TESTED = {Outcome.UNSUPPORTED, Outcome.UNAVAILABLE, Outcome.NOT_RUN}
_SHOWN = 12
"""Maximum number of untried claimed columns to list."""


def notes_on(
    subject: Subject, claims: Mapping[str, Claim], checks: Sequence[Check], known_failures: Sequence[KnownFailure]
) -> tuple[str, ...]:
    """Report an untried advance, known failures that cover nothing, and a contract newer than this library's."""
    return (*_advance(claims), *_unused(subject, checks, known_failures), *_version(subject))


def coverage_note(claims: Mapping[str, Claim], checks: Sequence[Check], results: Sequence[Result]) -> str:
    """Describe which claims no check has tried, and the largest batch shapes that were tried."""
    ran = [check for check, result in zip(checks, results, strict=False) if result.outcome not in _NOT_TESTED]
    covered = {column for check in ran for column in check.covers}
    missed = sorted(column for column, claim in claims.items() if claim.claimed and column not in covered)
    more = [f"and {len(missed) - _SHOWN} more"] if len(missed) > _SHOWN else []
    batches = [check.value.batch for check in ran if isinstance(check.value, Case)]
    return (
        f"claimed but not tested: {', '.join([*missed[:_SHOWN], *more]) or 'nothing'}; "
        f"rows up to {max((len(batch.seq_lens) for batch in batches), default=0)}, "
        f"lengths up to {max((max(batch.seq_lens, default=0) for batch in batches), default=0)}"
    )


def _advance(claims: Mapping[str, Claim]) -> Iterator[str]:
    claim = claims.get(ADVANCE)
    if claim is not None and claim.level not in ("", level_words(AdvanceLevel.IN_GRAPH)):
        yield f"advance is {claim.level.upper()}: {claim.reason}; in-graph advance was not tested"


def _unused(subject: Subject, checks: Sequence[Check], known_failures: Sequence[KnownFailure]) -> Iterator[str]:
    # A note, not a failure: the entry can be meant for another backend of the module, or for another device's cases.
    for entry in known_failures:
        if not any(entry.may_cover(check) for check in checks):
            yield (
                f"known failure {entry.check}[{entry.case}] ({entry.issue}) covers no check of {subject.backend.name} "
                f"on {subject.device.type}: correct its names, or remove it if no backend of its module needs it"
            )


def _version(subject: Subject) -> Iterator[str]:
    if subject.backend.contract_version > CONTRACT_VERSION:
        built_for, own = (".".join(map(str, v)) for v in (subject.backend.contract_version, CONTRACT_VERSION))
        yield (
            f"built for contract {built_for}, but this library has {own}: newer rules are unknown here and were not "
            "tested; install a later attn-backends for them"
        )
