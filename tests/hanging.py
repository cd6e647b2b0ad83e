"""Children that hang, and a clock for the limits that end them: these tests do not depend on a machine's speed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from spec_decode.testing import process_isolation

HANG = "open({mark!r}, 'w').close(); __import__('threading').Event().wait()"
"""Creates a file to show that it hangs, then waits forever."""
UNLIMITED = 1e6


def pass_limits_at(mark: Path, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make limits of at most `seconds` expire once the file exists and all output is read."""
    real = process_isolation.select.select

    def select(readers: list[int], writers: list[int], others: list[int], left: float) -> tuple[list[int], ...]:
        if left > seconds:
            return real(readers, writers, others, left)
        while True:
            hangs = mark.exists()
            ready = real(readers, writers, others, 0.02)
            if ready[0] or hangs:
                return ready

    monkeypatch.setattr(process_isolation, "select", SimpleNamespace(select=select))
