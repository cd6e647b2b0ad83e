"""Notes for whoever runs the checks: facts that no result states and that are neither a pass nor a failure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from builders import CONTRACT_VERSION, AdvanceLevel
from spec_decode.conformance.check import Check
from spec_decode.conformance.claims import level_words
from spec_decode.conformance.coverage import ADVANCE
from spec_decode.conformance.known_failures import KnownFailure
from spec_decode.conformance.report import Claim
from spec_decode.testing.subject import Subject


def notes_on(
    subject: Subject, claims: Mapping[str, Claim], checks: Sequence[Check], known_failures: Sequence[KnownFailure]
) -> tuple[str, ...]:
    """An advance that was not tried, entries that cover nothing, a contract from the future; checks: all there are."""
    return (*_advance(claims), *_idle(subject, checks, known_failures), *_version(subject))


def _advance(claims: Mapping[str, Claim]) -> Iterator[str]:
    claim = claims.get(ADVANCE)
    if claim is not None and claim.level not in ("", level_words(AdvanceLevel.IN_GRAPH)):
        yield f"advance is {claim.level.upper()}: {claim.reason}; what an advance in a graph promises was not tried"


def _idle(subject: Subject, checks: Sequence[Check], known_failures: Sequence[KnownFailure]) -> Iterator[str]:
    # A line and no failure: the entry may be for another backend of the module, or for the cases of another device.
    for entry in known_failures:
        if not any(entry.may_cover(check) for check in checks):
            yield (
                f"known failure {entry.check}[{entry.case}] ({entry.issue}) covers no check of {subject.backend.name} "
                f"on {subject.device.type}: correct its names, or remove it if no backend of its module needs it"
            )


def _version(subject: Subject) -> Iterator[str]:
    if subject.backend.contract_version > CONTRACT_VERSION:
        built_for, ours = (".".join(map(str, v)) for v in (subject.backend.contract_version, CONTRACT_VERSION))
        yield (
            f"built for contract {built_for}, this library has {ours}: what came in between is not known here, so it "
            "was neither kept nor tried; install a later attn-backends for that"
        )
