"""A check: one line of the contract, run on one case, for any backend. Failures are shrunk to a small batch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

import torch

from builders.devices import on_device
from spec_decode.conformance.coverage import EVERYTHING, FAMILIES, ON_REQUEST, Coverage
from spec_decode.testing.batches import Batch
from spec_decode.testing.outcome import CheckFailure, Measurements
from spec_decode.testing.process_exit import refuse_process_exit
from spec_decode.testing.state_subject import StateSubject
from spec_decode.testing.subject import Subject

AnySubject = Subject | StateSubject
Cases = Callable[[Any], Iterable[tuple[str, Any]]]
"""Yields (name, case) for a backend. Raises Unsupported if the backend rejects all of them."""
Body = Callable[[Any, Any], Measurements | None]
BOTH = (Subject, StateSubject)
"""What a check is of that asks for no spec: any kind of backend."""


@dataclass(frozen=True, slots=True)
class Check:
    """A named check on a named case. Calling it returns measurements.

    It raises CheckFailure, Unsupported or Unavailable; anything else is an error of the backend or of the check.
    """

    name: str
    """family.what_holds; stable across versions."""
    family: str
    case: str
    contract: str
    covers: tuple[str, ...]
    """The matrix columns that its result is evidence for."""
    run: Callable[[], Measurements]
    value: object = None
    """The case; or the exception, if the backend rejects every case or none could be made."""
    preview: str = ""
    """Why a failure does not count yet: the check is newer than the backend's contract version. Otherwise empty."""
    quick: bool = True
    """Whether it is part of a quick run."""
    module: str = ""
    """The module that defines its body."""

    @property
    def id(self) -> str:
        return f"{self.name}[{self.case}]"

    def __call__(self) -> Measurements:
        return self.run()


@dataclass(frozen=True, slots=True)
class _Definition:
    family: str
    verb: str
    contract: str
    cases: Cases
    covers: Coverage
    body: Body
    quick: str | None
    since: tuple[int, int]
    module: str
    of: tuple[type[AnySubject], ...]

    @property
    def name(self) -> str:
        return f"{self.family}.{self.verb}"

    def expand(self, subject: AnySubject) -> list[Check]:
        """Return the check on each of its cases; if no case could be made, a single check that raises the error."""
        try:
            cases = list(self.cases(subject))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # Unsupported, or any error from a plug-in's record; it belongs to the check
            return [self._check(subject, "any", (EVERYTHING,), error, _raising(error))]
        return [
            self._check(subject, name, self.covers(subject, case), case, self.body, quick=self._is_quick(place, name))
            for place, (name, case) in enumerate(cases)
        ]

    def _is_quick(self, place: int, case: str) -> bool:
        return place == 0 if self.quick is None else fnmatch(case, self.quick)

    def _check(
        self, subject: AnySubject, case: str, covers: Iterable[str], value: object, body: Body, *, quick: bool = True
    ) -> Check:
        def run() -> Measurements:
            if subject.device.type == "cuda" and torch.cuda.memory_allocated(subject.device) > _GARBAGE_BYTES:
                gc.collect()
            with on_device(subject.device), refuse_process_exit():
                return body(subject, value) or {}

        return Check(
            name=self.name,
            family=self.family,
            case=case,
            contract=self.contract,
            covers=tuple(dict.fromkeys(covers)),
            run=run,
            value=value,
            preview=self._preview(subject),
            quick=quick,
            module=self.module,
        )

    def _preview(self, subject: AnySubject) -> str:
        built_for = subject.backend.contract_version
        # An engine's builder was not built for any contract version.
        if subject.engine or self.since <= built_for:
            return ""
        new, own = (".".join(map(str, version)) for version in (self.since, built_for))
        return f"new in contract {new}, the backend was built for {own}"


_GARBAGE_BYTES = 1 << 30
"""Allocated device bytes above which a check first collects garbage: FlashInfer workspaces of earlier checks, 128 MiB
each, are rarely collected, because Python's collector counts objects."""
_definitions: list[_Definition] = []


class Family:
    """A decorator that defines the checks of one family. A check is named after its function."""

    def __init__(self, name: str, *, covers: Coverage, of: type[AnySubject] = Subject) -> None:
        """covers: the columns that a result is evidence for, unless a check declares others. of: what it checks."""
        self.name, self.covers, self.of = name, covers, of

    def __call__(
        self,
        contract: str,
        cases: Cases | None = None,
        *,
        covers: Coverage | None = None,
        advances: bool = False,
        shrink: bool = False,
        quick: str | None = None,
        since: tuple[int, int] = (1, 0),
        of: tuple[type[AnySubject], ...] = (),
    ) -> Callable[[Body], Body]:
        """Define a check: body(subject, case) for every (case name, case) that `cases` yields; a single case without
        it.

        advances: a case is unsupported unless the backend claims to advance its spec inside a graph. shrink: a failing
        case is reported with the smallest batch that still fails. quick: a pattern of the cases for a quick run, which
        an author repeats often; None for the first case. since: the contract version that introduced the check. For a
        backend built for an earlier version it is a preview: the backend still passes, and its author sees what the
        next version will require. of: the kinds of backends that it checks, if not the family's.
        """

        def define(body: Body) -> Body:
            def run(subject: Any, case: Any) -> Measurements | None:
                if advances:
                    subject.require_in_graph_advance(case.spec)
                if shrink:
                    return run_and_shrink(lambda batch: body(subject, replace(case, batch=batch)), case.batch)
                return body(subject, case)

            made = _Definition(
                family=self.name,
                verb=body.__name__,
                contract=contract,
                cases=cases or _one_case,
                covers=covers or self.covers,
                body=run,
                quick=quick,
                since=since,
                module=body.__module__,
                of=of or (self.of,),
            )
            _definitions.append(made)
            return body

        return define


def check_names() -> list[str]:
    """Return family.what_holds of every check."""
    return [f"{definition.family}.{definition.verb}" for definition in _definitions]


def expand(subject: AnySubject, requested: Collection[str] = (), families: Collection[str] = FAMILIES) -> list[Check]:
    """Return every check of these families on each case for this backend and device. requested: ON_REQUEST ones too."""
    meant = [each for each in _definitions if isinstance(subject, each.of) and each.family in families]
    wanted = (each for each in meant if each.family not in ON_REQUEST or each.family in requested)
    ordered = sorted(wanted, key=lambda definition: FAMILIES.index(definition.family))
    return [check for definition in ordered for check in definition.expand(subject)]


def _one_case(subject: AnySubject) -> list[tuple[str, None]]:
    return [("any", None)]


def _raising(error: BaseException) -> Body:
    def body(subject: AnySubject, value: object) -> Measurements:
        raise error

    return body


def run_and_shrink(run: Callable[[Batch], Measurements | None], batch: Batch) -> Measurements:
    """Return run(batch). If it raises CheckFailure, raise the failure of the smallest batch that still fails.

    Each request is tried alone without padding, shortest first: most failures need no second request.
    """
    try:
        return run(batch) or {}
    except CheckFailure as failure:
        small, shown = next(_failing(run, batch), (batch, failure))
        raise CheckFailure(
            contract=shown.contract, expected=shown.expected, got=shown.got, shrunk=_describe(small)
        ) from None


def _failing(run: Callable[[Batch], Measurements | None], batch: Batch) -> Iterator[tuple[Batch, CheckFailure]]:
    for length, query in sorted(zip(batch.seq_lens, batch.query_lens, strict=True)):
        alone = Batch((query,), (length,), 1)
        try:
            run(alone)
        except CheckFailure as failure:
            yield alone, failure
        except Exception:  # another error on a single request must not hide the failure being explained
            continue


def _describe(batch: Batch) -> str:
    if batch.rows == 1:
        return f"one request of {batch.seq_lens[0]} tokens, query length {batch.query_lens[0]}"
    return f"requests of {list(batch.seq_lens)} tokens in {batch.rows} rows; no request fails alone"
