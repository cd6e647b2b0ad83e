"""This library's plug-in for an engine, and the doctor's findings about it, without importing the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version

import attn_backends
from attn_backends.extras import install_hint
from attn_backends.findings import Finding, FindingStatus

_TOPIC = "engines"


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePlugIn:
    """This library's plug-in for an engine.

    package, title     the engine's, as pip and as its makers spell it
    unsupported        why the plug-in does not support an engine version; empty if it does
    group, variable    the entry point group that the engine calls, and the variable that restricts it
    needs              by name of a backend or a quantization, why it does not load; empty if it does
    chosen_by          how a model selects this name
    refused            why the plug-in does not load in this environment; empty if it does
    allowed            the names that a value of the variable allows; None: all
    """

    package: str
    title: str
    unsupported: Callable[[str], str]
    group: str
    variable: str
    needs: Mapping[str, Callable[[], str]]
    chosen_by: Callable[[str], str]
    refused: Callable[[], str] = lambda: ""
    allowed: Callable[[str], Collection[str] | None] = lambda value: value.split(",")

    def examine(self) -> Iterator[Finding]:
        """Yield findings for the engine and, if its version is supported, for the plug-in and each of its names."""
        try:
            found = version(self.package)
        except PackageNotFoundError:
            remedy = f"not installed: {install_hint(self.package)}"
            yield Finding(_TOPIC, self.package, FindingStatus.ABSENT, remedy)
            return
        reason = self.unsupported(found)
        yield _finding(self.package, reason, found)
        if reason:
            return
        yield _finding("its plug-ins", self._why_not_found(), f"{self.title} finds attn_backends among them")
        for name, why_not in self.needs.items():
            yield _finding(name, why_not(), f"it loads; {self.chosen_by(name)}")

    def _why_not_found(self) -> str:
        value = os.environ.get(self.variable)
        allowed = None if value is None else self.allowed(value)
        ours = f"attn_backends.engines.{self.package}:register"
        if not any(point.value == ours for point in entry_points(group=self.group)):
            return f"no package declares attn_backends in {self.group}: reinstall attn-backends"
        if allowed is not None and "attn_backends" not in allowed:
            return f"{self.variable}={value} excludes attn_backends: add it, or unset the variable"
        return self.refused()


def _finding(subject: str, reason: str, detail: str) -> Finding:
    """Return a finding that is REFUSED if there is a reason, else OK."""
    return Finding(_TOPIC, subject, FindingStatus.REFUSED if reason else FindingStatus.OK, reason or detail)


def why_not_loaded(name: str) -> Callable[[], str]:
    """Return a function that says why a backend of this library does not load; empty if it does."""

    def ask() -> str:
        try:
            attn_backends.get(name)
        except attn_backends.BackendError as error:
            return str(error)
        return ""

    return ask
