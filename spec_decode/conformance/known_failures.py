"""Failures that a backend's author knows about: known_failures.toml next to the backend's module."""

from __future__ import annotations

import inspect
from fnmatch import fnmatch
from pathlib import Path

import msgspec

from attn_backends import BrokenBackend
from attn_backends.registry import Backend
from spec_decode.conformance.check import Check

FILE = "known_failures.toml"


class KnownFailure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A check that is expected to fail. An issue is mandatory, and an unexpected pass is a failure.

    check, case: name patterns, as in `--only`. error: whether an exception from the backend is expected too. column: if
    it is not empty, only cases with this matrix column, such as feature:soft_cap; for drawn cases, whose names say
    nothing. Of these some can pass.
    """

    check: str
    reason: str
    issue: str
    case: str = "*"
    error: bool = False
    column: str = ""

    def __post_init__(self) -> None:
        if not self.issue or not self.reason:
            raise ValueError(
                f"known failure {self.check} needs a reason and an issue, got {self.reason!r} and {self.issue!r}; an "
                "untracked waiver would stay forever. Open an issue and name it."
            )

    @property
    def can_pass(self) -> bool:
        """Whether some of the checks that it covers can pass, so that a pass does not make it stale."""
        return bool(self.column)

    def covers(self, check: Check) -> bool:
        named = fnmatch(check.name, self.check) and fnmatch(check.case, self.case)
        return named and (not self.column or self.column in check.covers)

    def may_cover(self, check: Check) -> bool:
        """Whether it covers the check, or a check that could make no cases, so their names are unknown."""
        return self.covers(check) or (isinstance(check.value, BaseException) and fnmatch(check.name, self.check))


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    known_failure: tuple[KnownFailure, ...] = ()


def known_failures_of(backend: Backend) -> tuple[KnownFailure, ...]:
    """Read known_failures.toml in the folder of the backend's class; empty if there is no such file.

    Raises BrokenBackend for a malformed file: with entries lost, known failures would count as new ones.
    """
    try:
        path = Path(inspect.getfile(type(backend))).with_name(FILE)
        data = path.read_bytes()
    except (OSError, TypeError):
        return ()
    try:
        return msgspec.toml.decode(data, type=_File).known_failure
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BrokenBackend(
            f"{path} must hold tables [[known_failure]] with check, reason, issue and optionally case, column and "
            f"error: {error}; {backend.name} was not checked. Fix the file."
        ) from error
