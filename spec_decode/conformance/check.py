"""A check: one line of the contract, tried on one case, for any backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from attn_backends import AttentionBackend

Evidence = dict[str, float]


class CheckFailure(AssertionError):
    """The backend does not do what the contract says. smallest: the smallest case that shows it, if it was sought."""

    def __init__(self, *, contract: str, expected: str, got: str, smallest: str = "") -> None:
        shown = f"; smallest case: {smallest}" if smallest else ""
        super().__init__(f"contract: {contract}; expected: {expected}; got: {got}{shown}")
        self.contract, self.expected, self.got = contract, expected, got


class Unsupported(Exception):
    """The case is not claimed, and the backend refused it cleanly; the message is its reasons."""


class Unavailable(Exception):
    """The case needs something this machine has not."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is being checked, and where."""

    backend: AttentionBackend
    device: torch.device
    asked_as: str = ""
    """The name that it was asked for by; empty where the backend itself was given."""


@dataclass(frozen=True, slots=True)
class Check:
    """A named check on a named case. Calling it returns evidence, or raises one of the exceptions above."""

    name: str
    """family.what_holds; stable across versions."""
    case: str
    contract: str
    run: Callable[[], Evidence]
    value: object = None
    """The case itself; the exception, where the backend refuses every case or none could be made."""
    preview: str = ""
    """Why failing it is no failure yet: it came with a later contract than the backend was built for. Else empty."""

    @property
    def family(self) -> str:
        return self.name.split(".")[0]

    @property
    def id(self) -> str:
        return f"{self.name}[{self.case}]"

    def __call__(self) -> Evidence:
        return self.run()


@dataclass(frozen=True, slots=True)
class _Definition:
    name: str
    contract: str
    cases: Callable[[Subject], Iterable[tuple[str, Any]]]
    body: Callable[[Subject, Any], Evidence | None]
    since: tuple[int, int]

    def preview(self, subject: Subject) -> str:
        built_for = subject.backend.contract_version
        if self.since <= built_for:
            return ""
        new, own = (".".join(map(str, version)) for version in (self.since, built_for))
        return f"new in contract {new}, the backend was built for {own}"


_definitions: list[_Definition] = []


def check(
    name: str,
    contract: str,
    cases: Callable[[Subject], Iterable[tuple[str, Any]]] | None = None,
    *,
    since: tuple[int, int] = (1, 0),
) -> Callable[[Callable[[Subject, Any], Evidence | None]], Callable[[Subject, Any], Evidence | None]]:
    """Define a check: body(subject, case) for every (case name, case) that `cases` yields.

    since: the contract version that it came with. For a backend built for an earlier one it is a preview: what passed
    before passes still, and its author sees what the next version will ask.
    """

    def define(body: Callable[[Subject, Any], Evidence | None]) -> Callable[[Subject, Any], Evidence | None]:
        _definitions.append(_Definition(name, contract, cases or (lambda subject: [("any", None)]), body, since))
        return body

    return define


def expand(subject: Subject) -> list[Check]:
    """Every check on every case for this backend and device, in the order of definition."""
    return [check for definition in _definitions for check in _expand_one(definition, subject)]


def _expand_one(definition: _Definition, subject: Subject) -> list[Check]:
    preview = definition.preview(subject)
    try:
        cases = list(definition.cases(subject))
    except Unsupported as refusal:
        return [Check(definition.name, "any", definition.contract, _raise(refusal), refusal, preview)]
    except Exception as error:  # a plug-in's record may hold anything; that no case could be made is the check's error
        return [Check(definition.name, "any", definition.contract, _raise(error), error, preview)]
    return [
        Check(definition.name, name, definition.contract, _bind(definition, subject, case), case, preview)
        for name, case in cases
    ]


def _raise(why: Exception) -> Callable[[], Evidence]:
    def run() -> Evidence:
        raise why

    return run


def _bind(definition: _Definition, subject: Subject, case: Any) -> Callable[[], Evidence]:
    return lambda: definition.body(subject, case) or {}


def expect(condition: bool, *, contract: str, expected: str, got: object) -> None:
    """Raise CheckFailure unless condition holds."""
    if not condition:
        raise CheckFailure(contract=contract, expected=expected, got=str(got))
