"""The report of a conformance run: what was checked, how each check came out, and where."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from spec_decode.conformance.case_records import BatchRecord, SpecRecord
from spec_decode.conformance.coverage import FAMILIES
from spec_decode.environment import Environment
from spec_decode.files import ReportError, json_number, read_json, report_bytes, require_unedited, write_whole
from spec_decode.source_digests import SourceRecord
from spec_decode.testing.outcome import Outcome

SCHEMA = "attn-report/6"
READ_SCHEMAS = (SCHEMA, "attn-report/5")
"""What `Report` reads; the earlier one has no specs and batches."""
_SHOWN_FAILURES = 10
_T = TypeVar("_T")
_NON_FINITE = ("nan", "inf", "-inf")
Number = Annotated[float, msgspec.Meta(extra_json_schema={"type": ["number", "string"], "pattern": "^(nan|-?inf)$"})]
"""JSON has no NaN or infinity: they are written by name."""


_Index = Annotated[int, msgspec.Meta(ge=0)]


class ConformanceFailure(AssertionError):
    """A report that is not ok; the message lists each failed check and the command that repeats it."""

    report: Report

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report


LOADING = "contract.loads"
"""The only check in the report of a backend that does not load."""
FAILURES = frozenset({Outcome.FAIL, Outcome.XPASS, Outcome.ERROR})


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A backend's claim for one column. level: the degree, if there are degrees. reason: why it claims this or not, or
    its own statement."""

    claimed: bool
    level: str = ""
    reason: str = ""


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One check on one case. check: family.what_holds. evidence: measured numbers; the matrix shows
    "error_over_budget". tags: the matrix columns that it is evidence for, "axis:value". spec, batch: of its case;
    spec of its drafts if the case has none and they have one. None otherwise, and in reports of an earlier version.

    Raises ReportError for an unknown family, and for seconds that are negative or not finite.
    """

    check: str
    case: str
    outcome: Outcome
    reason: str = ""
    evidence: dict[str, Number] = {}
    seconds: float = 0.0
    tags: tuple[str, ...] = ()
    spec: SpecRecord | None = None
    batch: BatchRecord | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ReportError(f"{self.check} has an unknown family. Families are {', '.join(FAMILIES)}.")
        if not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise ReportError(f"seconds of {self.check} must be finite and not negative, got {self.seconds}.")

    @property
    def family(self) -> str:
        return self.check.partition(".")[0]


class ResultRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A result in a file. columns: its tags; spec, batch: each an index into the report's table of that name, as each
    of the columns is."""

    check: str
    case: str
    outcome: Outcome
    reason: str = ""
    evidence: dict[str, Number] = {}
    seconds: float
    columns: tuple[_Index, ...]
    spec: _Index | None = None
    batch: _Index | None = None


class DrawnRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cases that were drawn from the claims: how many, from which seed, and how many of the possible pairs of
    classes of values occur in them. missed: axis and label of each class that occurs in none."""

    seed: int
    cases: int
    pairs: int
    possible: int
    missed: tuple[tuple[str, str], ...] = ()


class _Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was checked, where, and with which source.

    contract: the contract version the backend was built for. claims: by tag; empty if the backend did not load.
    sources: the modules behind the checks, one part per family. package: the other project that declares the backend,
    with its version. engine: owner of the builder under test, with its version; empty for a backend of the library.
    drawn: the cases drawn from its claims; None if the checks have none.
    """

    backend: str
    version: str
    package: str = ""
    engine: str = ""
    contract: str = ""
    env: Environment
    command: str
    sources: SourceRecord = SourceRecord()
    claims: dict[str, Claim] = {}
    drawn: DrawnRecord | None = None


class ReportDocument(_Run, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A report in a file. columns: every tag of its results. specs, batches: of its cases, each once. digest: of
    everything else, to detect edits."""

    schema: str
    columns: tuple[str, ...] = ()
    specs: tuple[SpecRecord, ...] = ()
    batches: tuple[BatchRecord, ...] = ()
    results: tuple[ResultRow, ...]
    digest: str = ""


class Report(_Run, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every result of one backend on one device, and what the backend claimed there.

    Raises ReportError if a check appears twice for one case.
    """

    results: tuple[Result, ...]

    def __post_init__(self) -> None:
        seen = Counter((result.check, result.case) for result in self.results)
        if twice := next((f"{check}[{case}]" for (check, case), count in seen.items() if count > 1), None):
            raise ReportError(f"the report of {self.backend} has {twice} twice. Run the checks again.")

    @property
    def counts(self) -> dict[Outcome, int]:
        """Results per outcome, including outcomes with none."""
        found = [result.outcome for result in self.results]
        return {outcome: found.count(outcome) for outcome in Outcome}

    @property
    def ok(self) -> bool:
        """No failures and some proof: at least one pass, and one in families builder, numerics and state if any of
        their checks was selected. A backend that rejects every spec is therefore not ok."""
        return not self.unproven and not self.failures

    @property
    def failures(self) -> tuple[Result, ...]:
        """The results with outcome fail, xpass, error or not_run."""
        return tuple(result for result in self.results if result.outcome in FAILURES | {Outcome.NOT_RUN})

    @property
    def unproven(self) -> str:
        """Why the passes prove nothing; empty if they do."""
        if not self.counts[Outcome.PASS]:
            why = next(
                (f": {result.reason}" for result in self.results if result.check == LOADING and result.reason), ""
            )
            return f"no check passed, so nothing is proven{why}"
        telling = [result.outcome for result in self.results if result.family in ("builder", "numerics", "state")]
        if telling and Outcome.PASS not in telling:
            return "no builder, numerics or state check passed, so nothing is proven"
        return ""

    @property
    def unverified(self) -> tuple[str, ...]:
        """The columns that the backend claims and that no passed check covers."""
        passed = {tag for result in self.results if result.outcome is Outcome.PASS for tag in result.tags}
        return tuple(sorted(tag for tag, claim in self.claims.items() if claim.claimed and tag not in passed))

    def summary(self) -> str:
        """Return one line; pass and not_run are listed even when they are 0."""
        always = (Outcome.PASS, Outcome.NOT_RUN)
        parts = [f"{n} {outcome.value}" for outcome, n in self.counts.items() if n or outcome in always]
        where = f"{self.env.device.removeprefix('NVIDIA ')}, torch {self.env.torch}"
        return f"{self.backend}: {len(self.results)} checks = {', '.join(parts)} ({where})"

    def raise_if_failed(self) -> None:
        """Raise ConformanceFailure unless ok."""
        if self.ok:
            return
        lines = [
            f"{r.outcome.value}: {r.check}[{r.case}]: {r.reason}\n    {self.repro(r.check, r.case)}"
            for r in self.failures
        ]
        if len(lines) > _SHOWN_FAILURES:
            lines[_SHOWN_FAILURES:] = [f"and {len(lines) - _SHOWN_FAILURES} more"]
        if self.unproven:
            lines.append(self.unproven)
        raise ConformanceFailure("\n".join([self.summary(), *lines]), self)

    def repro(self, check: str, case: str) -> str:
        """Return the command that repeats a check on a case."""
        engine, device = self.engine.partition(" ")[0], "cpu" if self.env.cuda is None else "cuda"
        return repro_command(self.backend, check, case, engine=engine, device=device)

    def document(self) -> dict[str, Any]:
        """Return plain JSON-compatible data in a stable order, with evidence such as NaN by name. It is not sealed."""
        columns = _numbered(tag for result in self.results for tag in result.tags)
        specs, batches = (_numbered(each.spec for each in self.results), _numbered(each.batch for each in self.results))
        rows = tuple(_row(result, columns, specs, batches) for result in self.results)
        shared = {name: getattr(self, name) for name in _Run.__struct_fields__}
        document = ReportDocument(
            schema=SCHEMA,
            **shared,
            columns=tuple(columns),
            specs=tuple(specs),
            batches=tuple(batches),
            results=rows,
        )
        made: dict[str, Any] = msgspec.to_builtins(document)
        return {"schema": SCHEMA, **made}

    def to_json(self) -> bytes:
        """Encode the sealed document as file content."""
        return report_bytes(self.document())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON atomically, creating the folder."""
        write_whole(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Load a report. Raises ReportError if the file cannot be read, was edited, or is anything else."""
        return cls.of(read_json(path), str(path), sealed=True)

    @classmethod
    def of(cls, document: Any, where: str, *, sealed: bool = False) -> Report:
        """Convert a document to a report. Raises ReportError, naming `where`, for anything else; with sealed, also for
        an edited one."""
        schema = document.get("schema") if isinstance(document, dict) else None
        if schema not in READ_SCHEMAS:
            raise ReportError(
                f"{where} has schema {schema!r}, not {SCHEMA!r}. Run the checks again, or read it with the "
                "version that wrote it."
            )
        try:
            found = msgspec.convert(_with_numbers(document), ReportDocument)
            shared = {name: getattr(found, name) for name in _Run.__struct_fields__}
            report = cls(**shared, results=tuple(_result(row, found) for row in found.results))
        except (msgspec.ValidationError, ReportError, IndexError) as error:
            raise ReportError(
                f"{where} does not follow {SCHEMA}: {error}. Outcomes are "
                f"{', '.join(outcome.value for outcome in Outcome)}. Run the checks again."
            ) from error
        if sealed:
            require_unedited(document, where)
        return report


def repro_command(backend: str, check: str, case: str, *, engine: str = "", device: str) -> str:
    """Return the command that repeats a check of a backend on a case; engine: the builder's owner, without version."""
    subject = f"--engine {engine} {backend}" if engine else backend
    soak = re.match(r"r(\d+)-s(\d+)-", case) if check.startswith("soak.") else None
    length = f" --rounds {soak[1]} --seed {soak[2]}" if soak else ""
    drawn = re.fullmatch(r"s(\d+)-\d+", case)
    length = f" --seed {drawn[1]}" if drawn and drawn[1] != "0" else length
    return f"attn-backends check {subject} --device {device}{length} --only '{check}*{case}*'"


_IN_TABLES = {"columns", "spec", "batch"}


def _numbered(found: Iterable[_T | None]) -> dict[_T, int]:
    """Number distinct values in order of first use; None has no number."""
    return {each: i for i, each in enumerate(dict.fromkeys(each for each in found if each is not None))}


def _row(
    result: Result, columns: dict[str, int], specs: dict[SpecRecord, int], batches: dict[BatchRecord, int]
) -> ResultRow:
    fields = {name: getattr(result, name) for name in ResultRow.__struct_fields__ if name not in _IN_TABLES}
    fields["evidence"] = {key: json_number(value) for key, value in sorted(result.evidence.items())}
    return ResultRow(
        **fields,
        columns=tuple(columns[tag] for tag in result.tags),
        spec=None if result.spec is None else specs[result.spec],
        batch=None if result.batch is None else batches[result.batch],
    )


def _result(row: ResultRow, document: ReportDocument) -> Result:
    """Convert a row of a file. Raises IndexError for a missing column, spec or batch."""
    fields = {name: getattr(row, name) for name in row.__struct_fields__ if name not in _IN_TABLES}
    return Result(
        **fields,
        tags=tuple(document.columns[i] for i in row.columns),
        spec=None if row.spec is None else document.specs[row.spec],
        batch=None if row.batch is None else document.batches[row.batch],
    )


def _with_numbers(document: dict[str, Any]) -> dict[str, Any]:
    """Replace the names of non-finite evidence by floats; any other string is left for validation."""

    def row_with(row: Any) -> Any:
        if not (isinstance(row, dict) and isinstance(evidence := row.get("evidence"), dict)):
            return row
        return {**row, "evidence": {key: float(v) if v in _NON_FINITE else v for key, v in evidence.items()}}

    results = document.get("results")
    return {**document, "results": list(map(row_with, results))} if isinstance(results, list) else document
