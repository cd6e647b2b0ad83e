"""Where evidence is from: each run once, for the cells to refer to."""

from __future__ import annotations

import msgspec

from spec_decode.environment import Environment


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of a tool: what it looked at, where, when, and how to repeat it."""

    subject: str
    env: Environment
    command: str

    @property
    def commit(self) -> str:
        """Short, with what is known of the tree beside it, and whether it was stated and not read from git."""
        stated = f" ({self.env.stated})" if self.env.stated else ""
        if self.env.commit.startswith("unknown"):
            return self.env.commit + stated
        dirty = {True: " dirty", False: "", None: " (dirty or not: unknown)"}[self.env.dirty]
        return self.env.commit[:12] + dirty + stated


class Runs:
    """Collects runs, each once, and numbers them in the order they are first met."""

    def __init__(self) -> None:
        self._numbers: dict[Run, int] = {}

    @property
    def all(self) -> tuple[Run, ...]:
        return tuple(self._numbers)

    def number(self, subject: str, env: Environment, command: str) -> int:
        run = Run(subject=subject, env=env, command=command)
        return self._numbers.setdefault(run, len(self._numbers))
