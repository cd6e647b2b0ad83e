"""The sources of the matrix: check reports, draft pair agreement, and timings, each by its schema; and which are
stale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from spec_decode.conformance.report import READ_SCHEMAS, SCHEMA, Report
from spec_decode.environment import Environment
from spec_decode.files import ReportError, read_json, require_unedited
from spec_decode.source_digests import SourceRecord
from spec_decode.tools.timing_limit import TimingLimit

PATTERNS = ("check-*.json", "pair-agreement*.json", "bench-*.json")
"""File name patterns to search a folder for."""
Documents = dict[Path, Any]
"""The content of each JSON file, or the ReportError that explains why it cannot be read."""
AGREEMENT_SCHEMA = "attn-pair-agreement/5"
TIMING_SCHEMA = "attn-bench/3"


class AgreementRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A draft model on a backend in a strategy: the number of prompts whose tokens differ from eager drafting's, the
    same in each of the graph modes.

    unlike_plain: text differs from plain decoding; None if sampling makes that meaningless. unlike_alone: text or kept
    tokens differ from running the prompt alone; None if not tried. accepted: tokens kept per round by eager drafting.
    If the strategy was rejected, nothing was compared.
    """

    draft: str
    backend: str
    dtype: str
    batch_invariant: bool
    strategy: str
    graph_modes: tuple[str, ...]
    num_speculative_tokens: int
    temperature: float
    refusal: str
    prompts: int
    unlike_eager: int | None
    unlike_plain: int | None
    unlike_alone: int | None
    accepted: float | None

    @property
    def exact(self) -> bool:
        """Whether rounding cannot excuse a text that differs from plain decoding, or from running alone."""
        return self.batch_invariant or self.dtype == "float32"

    @property
    def broken(self) -> bool:
        """Whether a text differs that must not."""
        return bool(self.unlike_eager or (self.exact and (self.unlike_plain or self.unlike_alone)))


class Agreement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A report of draft pairs. digest: of everything else."""

    schema: str = AGREEMENT_SCHEMA
    env: Environment
    command: str
    sources: SourceRecord = SourceRecord()
    rows: tuple[AgreementRow, ...]
    digest: str = ""


class Quantiles(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Microseconds; in a file [p20, p50, p80]."""

    p20: float
    p50: float
    p80: float


class TimingEnvironment(Environment, frozen=True, kw_only=True):
    """Where a timing was taken, and the throughput of its copies and large products."""

    copy_bytes_per_us: float | None = None
    matmul_flops_per_us: float | None = None
    """None in reports that predate its measurement."""
    kernel_interval_us: float | None = None
    """Time between two kernels of a graph that do almost nothing."""

    @property
    def plain(self) -> Environment:
        return Environment(**{name: getattr(self, name) for name in Environment.__struct_fields__})


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What loading a target took.

    seconds      until all of it is on the device
    bytes        of its parameters
    host_peak    the most bytes of the process meanwhile, with mapped files; None if the system does not say
    device_peak  likewise of the device; None on a CPU
    """

    seconds: float
    bytes: int
    host_peak: int | None = None
    device_peak: int | None = None


class TimingRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A row of `attn-backends bench`. A case can add columns, which are not read here."""

    case: str
    backend: str
    peer: bool = False
    """Whether this is another project's kernel."""
    spec: str | None = None
    num_groups: int | None = None
    """KV groups advanced by one launch, if their number is compared."""
    strategy: str | None = None
    num_tokens: int | None = None
    """Query tokens per request, if their number is compared."""
    tree: bool | None = None
    """Whether these form a tree, if that is compared with the same number in a row."""
    num_reqs: int
    num_speculative_tokens: int | None = None
    context: int | None = None
    host_us: Quantiles | None = None
    gpu_us: Quantiles | None = None
    wall_us: Quantiles | None = None
    kernels_per_step: float | None = None
    floor_us: float | None = None
    floor_counts: int | None = None
    limits: tuple[TimingLimit, ...] = ()
    draft: str | None = None
    """For a whole engine: the draft's name."""
    accepted: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """For a whole engine: draft tokens kept per round."""
    per_user: float | None = None
    """For a whole engine: output tokens per second of one request."""
    load: Load | None = None
    """For a whole engine: what loading its target took."""
    temperature: float | None = None
    """For a draft round: the requests' temperature; 0 is greedy."""
    extend_in_graph: bool | None = None
    one_graph: bool | None = None
    host_waits: bool | None = None
    batch_invariant: bool = False

    @property
    def token_us(self) -> Quantiles | None:
        """For a whole engine: the time of a round divided by the tokens that it adds to a request."""
        if self.per_user is None or self.wall_us is None:
            return None
        tokens, us = 1 + (self.accepted or 0.0), self.wall_us
        return Quantiles(p20=us.p20 / tokens, p50=us.p50 / tokens, p80=us.p80 / tokens)


class TimingReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A report of `attn-backends bench`. missing: what could not be timed, and why. sources: the modules behind it, one
    part per requested case. floor_counts: what floors count; rows refer to it by index. titles: of its cases, for a
    page. digest: of everything else."""

    schema: str = TIMING_SCHEMA
    env: TimingEnvironment
    command: str
    sources: SourceRecord = SourceRecord()
    missing: tuple[str, ...] = ()
    floor_counts: tuple[str, ...] = ()
    titles: dict[str, str] = {}
    rows: tuple[TimingRow, ...]
    digest: str = ""


class Timing(TimingRow, frozen=True, kw_only=True):
    """A row with its report's environment and command. title: of its case, or the case. changed: the modules behind it
    that have changed since."""

    title: str
    env: TimingEnvironment
    command: str
    changed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sources:
    """Everything that was read."""

    reports: list[Report] = field(default_factory=list)
    agreements: list[Agreement] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Sources:
        """Read these files, and those in these folders that are named like evidence. Raises as `of`."""
        return cls.of(read_documents(files_below(paths)))

    @classmethod
    def of(cls, documents: Documents) -> Sources:
        """Sort documents by schema. Raises ReportError for one that could not be read, or that has no known schema."""
        sources = cls()
        for path, document in documents.items():
            if isinstance(document, ReportError):
                raise document
            sources._add(document, str(path))
        return sources

    def _add(self, document: Any, where: str) -> None:
        schema = _schema(document)
        if schema == AGREEMENT_SCHEMA:
            self.agreements.append(_follow(document, Agreement, where))
        elif schema == TIMING_SCHEMA:
            self.timings.extend(_timings(_follow(document, TimingReport, where)))
        elif schema in READ_SCHEMAS:
            self.reports.append(Report.of(document, where))
        else:
            raise ReportError(
                f"{where} has schema {schema or None!r}, but the matrix reads {SCHEMA}, {AGREEMENT_SCHEMA} and "
                f"{TIMING_SCHEMA}. Make it again, omit it, or read it with the version that wrote it."
            )
        require_unedited(document, where)


def read_documents(files: Iterable[Path]) -> Documents:
    """Read each file's document once."""

    def read(file: Path) -> Any:
        try:
            return read_json(file)
        except ReportError as error:
            return error

    return {file: read(file) for file in files}


def files_below(paths: Iterable[Path], patterns: Sequence[str] = PATTERNS) -> list[Path]:
    """Return the files among these paths, and those in the folders among them that match one of the patterns."""
    found: list[Path] = []
    for path in paths:
        below = (file for pattern in patterns for file in sorted(path.rglob(pattern)) if not file.is_dir())
        found += below if path.is_dir() else [path]
    return list(dict.fromkeys(found))


def _schema(document: Any) -> str:
    schema = document.get("schema") if isinstance(document, dict) else None
    return schema if isinstance(schema, str) else ""


def _timings(report: TimingReport) -> list[Timing]:
    changed: dict[str, tuple[str, ...]] = {}

    def changed_behind(case: str) -> tuple[str, ...]:
        part = next((name for name in report.sources.parts if case == name or case.startswith(f"{name}/")), "")
        if part not in changed:
            changed[part] = report.sources.changed([part] if part else ())
        return changed[part]

    return [
        Timing(
            **{name: getattr(row, name) for name in TimingRow.__struct_fields__},
            title=report.titles.get(row.case, row.case),
            env=report.env,
            command=report.command,
            changed=changed_behind(row.case),
        )
        for row in report.rows
    ]


def _follow(document: Any, kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise ReportError(
            f"{where} does not follow {_schema(document)}: {error}. Run the command that made it again."
        ) from error


class _Provenance(msgspec.Struct):
    """The fields common to all reports."""

    schema: str
    sources: SourceRecord = SourceRecord()


def stale_reports(documents: Documents) -> dict[Path, tuple[str, ...]]:
    """Return, for each report of any kind and device made from different source, the modules that changed since.

    JSON that is not a report is skipped. Raises ReportError for a file that cannot be read or was edited.
    """
    stale = {}
    for path, document in documents.items():
        if isinstance(document, ReportError):
            raise document
        require_unedited(document, str(path))
        try:
            changed = msgspec.convert(document, _Provenance).sources.changed()
        except msgspec.ValidationError:
            continue
        if changed:
            stale[path] = changed
    return stale
