"""The report of a conformance run: what was checked, how each check came out, and where."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import msgspec

from spec_decode.environment import Environment
from spec_decode.files import json_bytes, write_whole
from spec_decode.testing.outcome import Outcome

SCHEMA = "attn-report/3"
EVERYTHING = "*"
"""The tag of what holds for every column that has nothing of its own."""
FAMILIES = ("contract", "builder", "numerics", "refusal", "poison", "graph", "drafter")
_SHOWN_FAILURES = 10
_NON_FINITE = ("nan", "inf", "-inf")
Number = Annotated[float, msgspec.Meta(extra_json_schema={"type": ["number", "string"], "pattern": "^(nan|-?inf)$"})]
"""JSON has no NaN and no infinity: they are written by name."""


class ReportError(ValueError):
    """A file that is not a report of this schema; the message says what it is instead."""


class ConformanceFailure(AssertionError):
    """A report that is not ok; the message names each check that failed and the command that repeats it."""


FAILURES = frozenset({Outcome.FAIL, Outcome.XPASS, Outcome.ERROR})


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a backend says of itself for one column. level: how much of it, where there are degrees. reason: why it
    claims this or not, or its own statement.
    """

    claimed: bool
    level: str = ""
    reason: str = ""


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One check on one case. evidence: measured numbers; "error_over_budget" is what the matrix shows.

    tags: the columns of the matrix that it is evidence for, "axis:value".
    """

    check: str
    family: str
    case: str
    outcome: Outcome
    reason: str = ""
    evidence: dict[str, Number] = {}
    seconds: float = 0.0
    repro: str = ""
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not math.isfinite(self.seconds):
            raise ReportError(f"seconds of {self.check} must be finite, got {self.seconds}; no result was made.")


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every result of one backend on one device, and what the backend claimed there.

    contract: the contract version it was built for. claims: by tag; empty where the backend did not load. sources: by
    package, digests of the product's source that was checked. package: of another project that declares the backend,
    with its version. engine: whose own builder was checked, with its version; empty for a backend of the library.
    """

    schema: str = SCHEMA
    backend: str
    version: str
    package: str = ""
    engine: str = ""
    contract: str = ""
    env: Environment
    command: str
    sources: dict[str, str] = {}
    claims: dict[str, Claim] = {}
    results: tuple[Result, ...]

    @property
    def counts(self) -> dict[Outcome, int]:
        """Results per outcome, every outcome present."""
        found = [result.outcome for result in self.results]
        return {outcome: found.count(outcome) for outcome in Outcome}

    @property
    def ok(self) -> bool:
        """At least one pass, and no fail, xpass, error or not_run: zero checks run is a failure."""
        counts = self.counts
        return counts[Outcome.PASS] > 0 and not any(counts[bad] for bad in (*FAILURES, Outcome.NOT_RUN))

    def summary(self) -> str:
        """One line; pass and not_run are named even when they are 0."""
        always = (Outcome.PASS, Outcome.NOT_RUN)
        parts = [f"{n} {outcome.value}" for outcome, n in self.counts.items() if n or outcome in always]
        where = f"{self.env.device.removeprefix('NVIDIA ')}, torch {self.env.torch}"
        return f"{self.backend}: {len(self.results)} checks = {', '.join(parts)} ({where})"

    def raise_if_failed(self) -> None:
        """Raise ConformanceFailure unless ok."""
        if self.ok:
            return
        bad = [result for result in self.results if result.outcome in FAILURES | {Outcome.NOT_RUN}]
        lines = [f"{r.outcome.value}: {r.check}[{r.case}]: {r.reason}\n    {r.repro}" for r in bad]
        if len(lines) > _SHOWN_FAILURES:
            lines[_SHOWN_FAILURES:] = [f"and {len(lines) - _SHOWN_FAILURES} more"]
        if not self.counts[Outcome.PASS]:
            lines.append("no check passed, so nothing is proven")
        raise ConformanceFailure("\n".join([self.summary(), *lines]))

    def document(self) -> dict[str, Any]:
        """Plain data in a stable order, as JSON can hold it: such evidence as NaN by name."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        for result in document["results"]:
            result["evidence"] = {key: json_number(value) for key, value in sorted(result["evidence"].items())}
        return document

    def to_json(self) -> bytes:
        """The document, indented."""
        return json_bytes(self.document())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON, making the folder; an interrupt leaves the old file or the new, never a part."""
        write_whole(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """The report in a file; ReportError when it cannot be read or is anything else."""
        return cls.of(read_json(path), str(path))

    @classmethod
    def of(cls, document: Any, where: str) -> Report:
        """The report in a document. Raises ReportError, which says where the document is from, for anything else."""
        schema = document.get("schema") if isinstance(document, dict) else None
        if schema != SCHEMA:
            raise ReportError(
                f"a report must have schema {SCHEMA!r}, {where} has {schema!r}; it was not loaded. Run the checks "
                "again, or read it with the version that wrote it."
            )
        try:
            return msgspec.convert(_with_numbers(document), cls)
        except msgspec.ValidationError as error:
            raise ReportError(
                f"a report must follow {SCHEMA}, {where} does not: {error}; it was not loaded. Outcomes are "
                f"{', '.join(outcome.value for outcome in Outcome)}. Run the checks again."
            ) from error


def json_number(value: float) -> float | str:
    """The value, or its name where JSON has no number for it."""
    return value if math.isfinite(value) else str(float(value))


def read_json(path: str | os.PathLike[str]) -> Any:
    """What a JSON file holds; ReportError when it cannot be read, is no whole JSON or says one thing twice."""
    try:
        content = Path(path).read_bytes()
        document = msgspec.json.decode(content)
        # Of a key that stands twice the decoder keeps the last, and nobody would know of the first.
        json.loads(content, object_pairs_hook=_require_unique)
        return document
    except OSError as error:
        raise ReportError(
            f"a report must be a readable file, {path} is not: {error.strerror}; nothing was loaded. Check the path."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ReportError(
            f"a report must be whole JSON, {path} is not: {error}; it was not loaded. Run the checks again."
        ) from error


def _require_unique(pairs: list[tuple[str, Any]]) -> None:
    if twice := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
        raise ValueError(f"the key {twice[0]!r} stands twice in one object")


def _with_numbers(document: dict[str, Any]) -> dict[str, Any]:
    """Turn the names of non-finite evidence into floats, in place; validation sees any other string."""
    results = document.get("results")
    for result in results if isinstance(results, list) else []:
        evidence = result.get("evidence") if isinstance(result, dict) else None
        if isinstance(evidence, dict):
            evidence.update({key: float(value) for key, value in evidence.items() if value in _NON_FINITE})
    return document
