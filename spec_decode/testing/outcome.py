"""How a check can come out, and what it raises to say so: a failure in parts, a refusal, something missing here."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class Outcome(str, Enum):
    """How a check came out; a closed set."""

    PASS = "pass"
    FAIL = "fail"
    XFAIL = "xfail"
    """Failed, as its known-failures entry says."""
    XPASS = "xpass"
    """Passed although a known-failures entry says it fails: a failure, the entry is out of date."""
    UNSUPPORTED = "unsupported"
    """Not claimed, and the check saw the refusal."""
    UNAVAILABLE = "unavailable"
    """Needs something that this machine does not have."""
    ERROR = "error"
    PREVIEW = "preview"
    """Failed a check that is newer than the contract the backend was built for, which is no failure yet."""
    NOT_RUN = "not_run"


Measurements = dict[str, float]
"""Measured numbers by name. "error_over_budget" is what the matrix shows."""


class CheckFailure(AssertionError):
    """The backend does not do what the contract says. shrunk: the smallest case that shows it, if one was searched."""

    def __init__(self, *, contract: str, expected: str, got: str, shrunk: str = "") -> None:
        shown = f"; smallest case: {shrunk}" if shrunk else ""
        super().__init__(f"contract: {contract}; expected: {expected}; got: {got}{shown}")
        self.contract, self.expected, self.got = contract, expected, got


class Unsupported(Exception):
    """The case is not claimed, and the backend refused it cleanly; the message is its reasons."""


class Unavailable(Exception):
    """The case needs something that this machine does not have."""


def expect(condition: bool, *, contract: str, expected: str, got: object) -> None:
    """Raise CheckFailure unless the condition holds."""
    if not condition:
        raise CheckFailure(contract=contract, expected=expected, got=str(got))


def worst(each: Iterable[Measurements]) -> Measurements:
    """The measurements with the largest error relative to its budget; none of none."""
    return max(each, key=lambda measured: measured["error_over_budget"], default={})
