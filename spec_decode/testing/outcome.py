"""The outcomes of a check."""

from __future__ import annotations

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
