"""Children that hang, and a clock for the limits that end them: no test of a limit depends on how fast a machine is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from spec_decode.testing import process_isolation

HANG = "open({mark!r}, 'w').close(); __import__('threading').Event().wait()"
"""Says in a file that it hangs, and waits for what never comes."""
UNLIMITED = 1e6


def pass_limits_at(mark: Path, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have limits of so many seconds or fewer pass once the file is there and what was said is read."""
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
