"""The specs that a fixture runs, for checks whose case does not hold its spec."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from builders import AttentionSpec

_run: ContextVar[set[AttentionSpec] | None] = ContextVar("run", default=None)


@contextmanager
def specs_run() -> Iterator[set[AttentionSpec]]:
    """Yield a set that fills with the specs that fixtures run within this context."""
    found: set[AttentionSpec] = set()
    token = _run.set(found)
    try:
        yield found
    finally:
        _run.reset(token)


def note_spec(spec: AttentionSpec) -> None:
    """Say that a fixture runs this spec."""
    if (found := _run.get()) is not None:
        found.add(spec)
