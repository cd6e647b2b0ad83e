"""How a check can come out, and what it raises: a failure in parts, a rejection, something missing here."""

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
    """Passed although a known-failures entry says it fails: a failure, because the entry is out of date."""
    UNSUPPORTED = "unsupported"
    """Not claimed, and the check saw the rejection."""
    UNAVAILABLE = "unavailable"
    """Needs something that this machine does not have."""
    ERROR = "error"
    PREVIEW = "preview"
    """Failed a check newer than the contract the backend was built for, which does not count as a failure yet."""
    NOT_RUN = "not_run"


Measurements = dict[str, float]
"""Measured numbers by name. The matrix shows "error_over_budget"."""


class CheckFailure(AssertionError):
    """The backend violates the contract. shrunk: the smallest case that shows it, if one was searched for."""

    def __init__(self, *, contract: str, expected: str, got: str, shrunk: str = "") -> None:
        shown = f"; smallest case: {shrunk}" if shrunk else ""
        super().__init__(f"contract: {contract}; expected: {expected}; got: {got}{shown}")
        self.contract, self.expected, self.got = contract, expected, got


class Unsupported(Exception):
    """The case is not claimed, and the backend rejected it cleanly; the message holds its reasons."""


class Unavailable(Exception):
    """The case needs something that this machine does not have."""


def expect(condition: bool, *, contract: str, expected: str, got: object) -> None:
    """Raise CheckFailure unless the condition holds."""
    if not condition:
        raise CheckFailure(contract=contract, expected=expected, got=str(got))


def worst(each: Iterable[Measurements]) -> Measurements:
    """Return the measurements with the largest error relative to the budget; empty for no input."""
    return max(each, key=lambda measured: measured["error_over_budget"], default={})
